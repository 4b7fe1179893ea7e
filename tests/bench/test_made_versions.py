"""Versions made by hand differ from the original in what they say, and in nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.swap.made_versions import noise, one_scale, overflow, swapped, write_version
from bench.tiny_model import write_checkpoint
from checkpoints.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("made") / "original")


def tensors(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    source = checkpoint.source
    return {name: np.array(source.read(name)) for name in source.names()}


def changed(original: Path, folder: Path) -> set[str]:
    before, after = tensors(original), tensors(folder)
    assert before.keys() == after.keys()
    return {name for name in before if not np.array_equal(before[name], after[name])}


def test_a_version_without_change_has_the_same_tensors(original: Path, tmp_path: Path):
    assert changed(original, write_version(original, tmp_path / "same")) == set()


def test_noise_is_of_the_size_that_was_asked_for(original: Path, tmp_path: Path):
    folder = write_version(original, tmp_path / "noisy", noise(0.1, 3))
    before, after = tensors(original), tensors(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    error = np.sqrt(np.mean((after[name] - before[name]) ** 2) / np.mean(before[name] ** 2))
    assert error == pytest.approx(0.1, rel=0.05)
    assert all(name.endswith("norm.weight") for name in before.keys() - changed(original, folder))


def test_one_scale_is_one_product(original: Path, tmp_path: Path):
    folder = write_version(original, tmp_path / "scaled", one_scale(1, 2.0))
    name = "model.layers.1.mlp.down_proj.weight"
    assert changed(original, folder) == {name}
    assert np.array_equal(tensors(folder)[name], 2 * tensors(original)[name])


def test_layers_change_places(original: Path, tmp_path: Path):
    folder = write_version(original, tmp_path / "swapped", moved=swapped(0, 1))
    before, after = tensors(original), tensors(folder)
    for part in ("mlp.up_proj.weight", "input_layernorm.weight"):
        assert np.array_equal(after[f"model.layers.0.{part}"], before[f"model.layers.1.{part}"])
        assert np.array_equal(after[f"model.layers.1.{part}"], before[f"model.layers.0.{part}"])
    assert np.array_equal(after["model.norm.weight"], before["model.norm.weight"])


def test_overflowing_weights_are_finite(original: Path, tmp_path: Path):
    folder = write_version(original, tmp_path / "over", overflow)
    assert changed(original, folder) == {"model.norm.weight"}
    assert all(np.isfinite(values).all() for values in tensors(folder).values())
