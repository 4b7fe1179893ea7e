"""New versions of the weights: found, checked, placed, served, let go; the running one never
notices.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.build import build
from jaxinfer.errors import ConfigError, Conflict, InvalidRequest
from jaxinfer.scheduling.request import Request
from jaxinfer.version_order import SwapMode, VersionOrder
from tests.tiny import tiny_engine_config
from tests.tiny_llm import SMALL, shared_cache
from tests.version_world import (
    GREEDY,
    World,
    answers,
    changed,
    drop,
    free,
    live_bytes,
    reconfigured,
)


def test_two_versions_under_way_at_once_say_each_what_it_says_alone(kept: World):
    phases: list[str] = []
    opened = kept.open(kept.theirs)
    assert (opened.name, opened.manner, opened.root) == (kept.other, "beside", str(kept.theirs))
    version = opened.load(phases.append)
    assert phases == ["compare checksums", "read and check weights"]
    assert version.name == kept.other
    assert version.max_model_len == kept.built.max_model_len
    assert version.vocab_size == kept.engine.vocab_size
    size = kept.built.plan.weights_bytes
    assert version.weights_bytes == size
    assert kept.built.memory_bytes["weights"] == 2 * size
    assert kept.engine.versions == (kept.built.version,)
    version.install(kept.engine)
    version.discard()  # is the engine's now
    assert kept.engine.version == kept.built.version
    both = answers(kept.engine, kept.built.version, kept.other, None)
    ours, theirs = kept.says[kept.built.version], kept.says[kept.other]
    assert both == [ours, theirs, ours]
    assert kept.built.version_source._loaded.origin_of(kept.other).source.model == str(kept.theirs)
    drop(kept, kept.other)
    with pytest.raises(ConfigError, match="expected a version that is loaded"):
        kept.built.version_source._loaded.origin_of(kept.other)


def test_a_load_beside_running_requests_changes_nothing_of_them(kept: World):
    opened = kept.open(kept.theirs)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(opened.load, lambda phase: None)
        while not loading.done():
            assert answers(kept.engine, None) == [kept.says[kept.built.version]]
    loading.result().discard()


def test_twenty_cycles_of_load_and_drop_leave_nothing_behind(kept: World):
    gc.collect()  # arrays of other tests
    before = live_bytes()
    for _ in range(20):
        kept.load(kept.theirs).install(kept.engine)
        assert answers(kept.engine, kept.other) == [kept.says[kept.other]]
        drop(kept, kept.other)
        assert live_bytes() == before


def test_a_version_that_is_discarded_leaves_nothing_behind(kept: World):
    version = kept.load(kept.theirs)
    version.discard()
    version.discard()
    with pytest.raises(Conflict, match="installed or discarded"):
        version.install(kept.engine)


@pytest.mark.parametrize("swap_mode", ["beside", "stream"])
def test_the_version_that_runs_is_loaded_again(kept: World, swap_mode: SwapMode):
    own = kept.built.version
    source = kept.built.version_source._loaded.origin_of(own).source
    order = VersionOrder(source, expected_version=own, swap_mode=swap_mode)
    opened = kept.built.version_source.open(order)
    assert opened.name == own
    arrays = jax.tree.leaves(kept.built.runner._params[own])
    opened.load(lambda phase: None).install(kept.engine)
    assert all(array.is_deleted() for array in arrays)


def test_a_version_that_is_being_let_go_comes_back(kept: World):
    kept.load(kept.theirs).install(kept.engine)
    kept.engine.submit(Request("r", (1, 2), GREEDY, version=kept.other))
    kept.engine.step()
    kept.engine.drop_version(kept.other)
    with pytest.raises(InvalidRequest, match="takes no requests"):
        kept.engine.submit(Request("s", (1, 2), GREEDY, version=kept.other))
    kept.load(kept.theirs).install(kept.engine)
    assert answers(kept.engine, kept.other) == [kept.says[kept.other]]
    drop(kept, kept.other)


def test_weights_of_two_bytes_become_what_a_start_makes_of_them(
    kept: World, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}

    model = changed(kept.theirs, tmp_path / "m", halve)
    alone = build(tiny_engine_config(model, shared_cache(tmp_path_factory), **SMALL))
    said, name = answers(alone.engine, None), alone.version
    free(alone)
    kept.load(model).install(kept.engine)
    assert answers(kept.engine, name) == said
    drop(kept, name)


def test_what_programs_do_not_see_may_differ(kept: World, tmp_path: Path):
    keys = {"bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "float16", "name": "x"}
    keys |= {"max_position_embeddings": 4096, "architectures": ["MistralForCausalLM"]}
    version = kept.load(reconfigured(kept.theirs, tmp_path / "m", **keys))
    assert version.manner == "beside"
    assert {2, 3} <= version.model_version.eos_token_ids
    version.install(kept.engine)
    assert answers(kept.engine, version.name) == [kept.says[kept.other]]
    drop(kept, version.name)
