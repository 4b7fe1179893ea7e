"""A version that takes the place of the current one, tensor by tensor, or fails to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from jaxinfer.build import build
from jaxinfer.errors import Conflict, EngineFailure
from jaxinfer.scheduling.request import Request
from tests.tiny import tiny_engine_config
from tests.tiny_llm import SMALL, shared_cache
from tests.version_world import (
    GREEDY,
    WEIGHTS,
    World,
    answers,
    changed,
    free,
)


def test_another_version_takes_the_place_of_the_current_one_and_gives_it_back(kept: World):
    version = kept.load(kept.theirs, "stream")
    assert version.manner == "stream"
    assert kept.built.memory_bytes["weights"] == kept.built.plan.weights_bytes
    version.install(kept.engine)
    assert kept.engine.version == kept.other
    assert kept.engine.versions == kept.built.runner.versions == (kept.other,)
    assert answers(kept.engine, None) == [kept.says[kept.other]]
    kept.load(kept.ours, "stream").install(kept.engine)


def test_nothing_is_replaced_under_a_living_request(kept: World):
    version = kept.load(kept.theirs, "stream")
    kept.engine.submit(Request("r", (1, 2), GREEDY))
    with pytest.raises(Conflict, match="drain first"):
        version.install(kept.engine)
    kept.engine.abort("r")
    version.discard()


def test_a_file_that_was_written_after_the_check_changes_nothing(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    version = kept.load(model, "stream")
    os.utime(model / WEIGHTS, (1, 1))
    with pytest.raises(CheckpointError, match="found it written since"):
        version.install(kept.engine)


NUM_WEIGHTS = 2 + 2 * 9  # embedding, norm, and of two layers


def test_a_swap_that_fails_at_any_tensor_is_undone(kept: World, tmp_path: Path):
    for place in range(NUM_WEIGHTS):
        model = changed(kept.theirs, tmp_path / str(place), lambda tensors: None)
        version = kept.load(model, "stream")
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, place, partial(os.truncate, model / WEIGHTS, 100))
            is_last = place == NUM_WEIGHTS - 1
            message = "found it written since" if is_last else "cut short while it was read"
            with pytest.raises(CheckpointError, match=message):
                version.install(kept.engine)
        if place in (0, NUM_WEIGHTS // 2):
            assert answers(kept.engine, None) == [kept.says[kept.built.version]]


def break_at(patch: pytest.MonkeyPatch, place: int, damage: Callable[[], None]) -> None:
    """Calls `damage` when so many tensors have been replaced, once."""
    import jaxinfer.runtime.streamed_weights as module

    num_put, device_put = 0, jax.device_put

    def put(array: np.ndarray) -> jax.Array:
        nonlocal num_put
        if num_put == place:
            damage()
        num_put += 1
        return device_put(array)

    patch.setattr(module.jax, "device_put", put)


def test_a_swap_that_cannot_be_undone_says_that_only_a_restart_helps(
    version_world: World,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    ours = changed(version_world.ours, tmp_path / "ours", lambda tensors: None)
    model = changed(version_world.theirs, tmp_path / "m", lambda tensors: None)
    built = build(tiny_engine_config(ours, shared_cache(tmp_path_factory), **SMALL))
    own = dataclasses.replace(version_world, built=built)
    version = own.load(model, "stream")

    def lose() -> None:
        os.truncate(model / WEIGHTS, 100)
        (ours / WEIGHTS).unlink()

    break_at(monkeypatch, 3, lose)
    with pytest.raises(EngineFailure) as caught:
        version.install(built.engine)
    free(built)
    assert "could not be read again" in str(caught.value)
    assert "restart the server" in str(caught.value)
