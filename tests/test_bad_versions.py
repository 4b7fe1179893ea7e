"""What is no version of the model that runs is refused; that one never notices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from jaxinfer import fitting_version
from jaxinfer.config import ModelSource
from jaxinfer.errors import ConfigError
from jaxinfer.found_model import find_model
from jaxinfer.new_version import NewVersion
from jaxinfer.runtime import memory_plan
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.version_loading import VersionLoading
from jaxinfer.version_order import SwapMode, VersionOrder
from pallas_kernels.backend import REFERENCE
from tests.version_world import (
    UP,
    WEIGHTS,
    World,
    changed,
    not_a_number,
    quantized,
    reconfigured,
    write_sums,
)


def cut(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP] = tensors[UP][:-1]


def infinite_norm(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"][0] = np.inf


def integers(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP] = tensors[UP].astype(np.int32)


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "missing": (lambda t: t.pop(UP), f"expected 1 tensor {UP!r}, found 19 tensors without"),
    "extra": (lambda t: t.update(x=t[UP]), "found also 1 tensor 'x'"),
    "shape": (cut, rf"tensor {UP!r} has shape \(79, 48\), the model needs \(80, 48\)"),
    "dtype": (integers, f"tensor {UP!r} has dtype int32, the model needs a floating one"),
    "NaN": (not_a_number, f"tensor {UP!r}: expected finite numbers of float32, found NaN"),
    "infinity": (infinite_norm, "tensor 'model.norm.weight': expected finite numbers"),
}


@pytest.mark.parametrize("swap_mode", ["beside", "stream"])
@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_tensors_that_are_wrong_are_refused_by_name(
    kept: World, tmp_path: Path, fault: str, swap_mode: SwapMode
):
    change, message = BAD_TENSORS[fault]
    model = changed(kept.theirs, tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        kept.load(model, swap_mode)
    assert str(caught.value).startswith(str(model))


def test_a_path_without_a_model_is_refused(kept: World, tmp_path: Path):
    with pytest.raises(CheckpointError, match="expected an existing file or folder"):
        kept.open(tmp_path / "no such")
    with pytest.raises(CheckpointError, match="found neither"):
        kept.open(tmp_path)


def test_a_truncated_file_is_refused(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 1)
    with pytest.raises(CheckpointError, match="expected a whole safetensors file"):
        kept.open(model)


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    opened = kept.open(model)
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size // 2)
    with pytest.raises(CheckpointError, match="it was cut short while it was read"):
        opened.load(lambda phase: None)


def test_a_file_that_is_written_while_it_is_read_is_refused(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    opened = kept.open(model)
    with (model / WEIGHTS).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0" * 4)
    with pytest.raises(CheckpointError, match="found it written since"):
        opened.load(lambda phase: None)


def test_an_architecture_that_nobody_knows_is_refused(kept: World, tmp_path: Path):
    model = reconfigured(kept.theirs, tmp_path / "m", architectures=["MambaForCausalLM"])
    with pytest.raises(CheckpointError, match="got MambaForCausalLM"):
        kept.open(model)


def test_other_content_than_was_expected_is_refused(kept: World):
    message = f"expected the version {'0' * 16}, found {kept.other}; give the files"
    with pytest.raises(CheckpointError, match=message):
        kept.open(kept.theirs, expected="0" * 16)
    kept.open(kept.theirs, expected=kept.other).close()


def test_checksums_beside_the_weights_are_compared(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    write_sums(model)
    kept.load(model).discard()
    write_sums(model, **{WEIGHTS: "0" * 64})
    opened = kept.open(model)
    with pytest.raises(CheckpointError, match=f"expected SHA-256 {'0' * 64} by SHA256SUMS, found"):
        opened.load(lambda phase: None)


RUNNER: dict[str, Any] = {"layer_kinds": (), "num_seats": 8, "make_pages": list, "vocab_size": 1}


@pytest.mark.parametrize(
    ("certificate", "message"),
    [
        ({"kl": None}, r"expected a certificate of these weights \(\w+\), found none"),
        ({"of": "0" * 16}, f"found one of {'0' * 16}"),
        ({"kl": 0.2}, "expected a KL divergence of at most 0.05 nats"),
    ],
)
def test_weights_that_cost_too_much_are_refused(
    kept: World, tmp_path: Path, certificate: dict[str, Any], message: str
):
    with pytest.raises(CheckpointError, match=message):
        kept.open(quantized(tmp_path / "m", **certificate))


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, kept: World):
    """Of int8 beside int8; no program of theirs is there, and none is needed."""
    good = quantized(tmp_path / "good")
    built, cache_dir = kept.built, tmp_path / "cache"
    found = find_model(
        ModelSource(str(good)), REFERENCE, cache_dir, max_model_len=None, show_progress=False
    )
    config, first = built.version_source._config, {found.version: {}}
    runner = ModelRunner(first, [], built.runner._programs, **RUNNER)
    loading = VersionLoading(config, found, runner, built.plan, cache_dir=cache_dir, programs="")

    def load(model: Path, **fields: Any) -> NewVersion:
        order = VersionOrder(ModelSource(str(model), **fields))
        return loading.open(order).load(lambda phase: None)

    version = load(good)
    assert version.lines[0].startswith("int8 by nearest: KL 0.003")
    version.discard()

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.mlp.up_proj.scale"][0, 2] = np.nan

    bad = changed(good, tmp_path / "bad", spoil)
    with pytest.raises(CheckpointError, match=r"up_proj.scale' has nan at \(0, 2\)"):
        load(bad, max_kl=np.inf)
    rounded = changed(kept.theirs, tmp_path / "rounded", not_a_number)
    with pytest.raises(CheckpointError, match=f"tensor {UP!r}: expected finite numbers"):
        load(rounded, quantization="int8")
    runner._newest.delete()


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_version_without_room_is_refused_with_what_is_missing(
    kept: World, monkeypatch: pytest.MonkeyPatch, is_gpu: bool
):
    plan, loaded = kept.built.plan, kept.built.version_source._loaded
    size = plan.weights_bytes
    if is_gpu:
        budget = MemoryBudget(plan.programs_bytes + plan.pool_bytes + 2 * size - 1, 0, 1 << 40)
        monkeypatch.setattr(loaded, "plan", dataclasses.replace(plan, budget=budget))
        needed, free = size, size - 1
    else:
        monkeypatch.setattr(memory_plan, "free_bytes", lambda root: 1000)
        needed, free = (
            size + fitting_version.spare_bytes(loaded.origin_of(kept.built.version).decoder),
            1000,
        )
    with pytest.raises(ConfigError) as caught:
        kept.open(kept.theirs)
    assert (
        f"version {kept.other} of {kept.theirs} needs {needed} bytes beside what is loaded, but "
        f"{free} are free: {needed - free} are missing; load it with swap_mode stream, which "
        "pauses serving, drop another version, or start with a smaller --kv-cache-memory"
    ) in str(caught.value)
    if is_gpu:
        kept.open(kept.theirs, "stream").close()
        return
    with pytest.raises(ConfigError, match="are missing; drop another version, or start"):
        kept.open(kept.theirs, "stream")
