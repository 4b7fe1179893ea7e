"""What the running programs do not compute gets an engine of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from jaxinfer import own_engine_version
from jaxinfer.build import build
from jaxinfer.config import EngineConfig
from jaxinfer.errors import Conflict
from jaxinfer.new_version import Manner, NewVersion
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.versions import ModelVersion
from tests.tiny import tiny_engine_config
from tests.tiny_llm import SMALL, shared_cache
from tests.version_world import (
    WEIGHTS,
    World,
    answers,
    certify,
    changed,
    quantized,
    reconfigured,
    write_sums,
)


@pytest.mark.parametrize(
    ("keys", "difference"),
    [
        ({"intermediate_size": 96}, "intermediate_size 96 (here 80)"),
        ({"rope_theta": 5e5}, "rope_theta 500000.0 (here 10000.0)"),
        ({"max_position_embeddings": 320}, "a limit of 320 tokens (here 640)"),
    ],
)
def test_what_the_programs_do_not_compute_needs_an_engine_of_its_own(
    kept: World, tmp_path: Path, keys: dict[str, Any], difference: str
):
    model = reconfigured(kept.theirs, tmp_path / "m", **keys)
    opened = kept.open(model)
    assert opened.manner == "engine"
    assert opened.lines == (f"not what the running programs compute: {difference}",)
    opened.close()


@pytest.mark.slow
def test_a_version_with_an_engine_of_its_own_comes_and_goes(kept: World, tmp_path: Path):
    model = quantized(tmp_path / "m")
    before, phases = kept.built.memory_bytes, list[str]()
    version = kept.open(model).load(phases.append)
    assert phases[:2] == ["compare checksums", "compile"]
    assert phases[-2:] == ["load weights", "allocate KV pool"]
    assert version.engine is not None
    [said] = answers(version.engine, None)
    assert said not in kept.says.values()
    after = kept.built.memory_bytes
    assert after["weights"] == before["weights"] + version.weights_bytes
    assert after["kv_pool"] == 2 * before["kv_pool"]
    assert answers(kept.engine, None) == [kept.says[kept.built.version]]
    version.discard()
    assert kept.built.memory_bytes == before


class FakeSecondEngine:
    """In the place of `load_engine`: reads the weights, and plans as the running engine did."""

    def __init__(self, plan: MemoryPlan):
        self.plan = plan
        self.asked: dict[str, Any] = {}

    def __call__(self, config: EngineConfig, *found: Any, **options: Any) -> NewVersion:
        checkpoint, choice, decoder, tokenizer, budget = found
        self.asked = {"config": config, "budget": budget, **options}
        options["on_progress"]("compile")
        params = options["load"](checkpoint, decoder)
        options["on_plan"](self.plan)

        def discard() -> None:
            for array in jax.tree.leaves(params):
                array.delete()

        version = ModelVersion(choice.version, tokenizer, frozenset())
        root, size = config.source.model, decoder.params_bytes
        args = version, "engine", root, {}, 10, 20, size, ("planned",), lambda engine: None
        return NewVersion(*args, discard)


@pytest.fixture
def second(kept: World, monkeypatch: pytest.MonkeyPatch) -> FakeSecondEngine:
    fake = FakeSecondEngine(kept.built.plan)
    monkeypatch.setattr(own_engine_version, "load_engine", fake)
    return fake


def test_an_engine_of_its_own_is_made_of_what_was_found(
    kept: World, second: FakeSecondEngine, tmp_path: Path
):
    model = quantized(tmp_path / "m")
    write_sums(model)
    before, phases = kept.built.memory_bytes, list[str]()
    version = kept.open(model).load(phases.append)
    assert phases == ["compare checksums", "compile"]
    assert version.root == second.asked["config"].source.model == str(model)
    assert second.asked["running_model_len"] == kept.built.max_model_len
    assert version.lines == (
        "not what the running programs compute: int8 weights (here float32)",
        "planned",
    )
    kinds = "weights", "programs", "kv_pool"
    twice = {kind: 2 * size for kind, size in before.items() if kind in kinds}
    assert kept.built.memory_bytes == before | twice
    version.discard()
    assert kept.built.memory_bytes == before
    write_sums(model, **{WEIGHTS: "0" * 64})
    with pytest.raises(CheckpointError, match="expected SHA-256"):
        kept.load(model)


@pytest.mark.usefixtures("second")
def test_an_engine_of_its_own_for_damaged_weights_is_not_kept(kept: World, tmp_path: Path):
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][0] = np.nan

    good = quantized(tmp_path / "good", kl=None)
    bad = changed(good, tmp_path / "bad", spoil)
    certify(bad)
    before = kept.built.memory_bytes
    with pytest.raises(CheckpointError, match=r"'model.norm.weight': expected finite numbers"):
        kept.load(bad)
    assert kept.built.memory_bytes == before


def test_when_the_first_engine_is_gone_nothing_fits_it(
    kept: World, tmp_path_factory: pytest.TempPathFactory
):
    built = build(tiny_engine_config(kept.ours, shared_cache(tmp_path_factory), **SMALL))
    own = dataclasses.replace(kept, built=built)
    late = own.load(kept.theirs)
    built.close()
    with pytest.raises(Conflict, match="was loaded for is gone; load it again"):
        late.install(built.engine)
    late.discard()
    opened = own.open(kept.theirs)
    assert opened.manner == "engine"
    opened.close()
    kinds = "weights", "programs", "kv_pool"
    assert [built.memory_bytes[kind] for kind in kinds] == [0, 0, 0]


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize("manner", ["beside", "stream", "engine"])
def test_a_load_that_is_given_up_ends_and_leaves_nothing_behind(
    kept: World, tmp_path: Path, manner: Manner
):
    model = quantized(tmp_path / "m") if manner == "engine" else kept.theirs
    opened = kept.open(model, "stream" if manner == "stream" else "beside")
    assert opened.manner == manner

    def give_up(phase: str) -> None:
        if phase in ("read and check weights", "compile"):
            opened.close()

    with pytest.raises(Conflict, match="given up while it was read"):
        opened.load(give_up)
