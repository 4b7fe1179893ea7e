"""Versions of a model made by hand: good ones that differ, and bad ones of each kind.

Written as Hugging Face folders beside the original, one tensor at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.save import CheckpointWriter

Change = Callable[[str, np.ndarray], np.ndarray]
"""Takes a tensor's name and its float32 values, which it may write; returns the new ones."""

LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
NOT_FINITE_ONCE_MULTIPLIED = 3e38  # a float32 itself


def noise(size: float, seed: int) -> Change:
    """Adds normal noise of so much of a matrix's own root mean square."""
    random = np.random.default_rng(seed)

    def change(name: str, values: np.ndarray) -> np.ndarray:
        if values.ndim == 2:
            rms = float(np.sqrt(np.mean(np.square(values))))
            values += random.standard_normal(values.shape, np.float32) * np.float32(size * rms)
        return values

    return change


def overflow(name: str, values: np.ndarray) -> np.ndarray:
    """Numbers that are finite, and whose products are not."""
    if name.endswith("model.norm.weight"):
        values[:] = NOT_FINITE_ONCE_MULTIPLIED
    return values


def one_scale(layer: int, factor: float) -> Change:
    """One product's weights by a factor, as with a wrong scale."""

    def change(name: str, values: np.ndarray) -> np.ndarray:
        is_it = name.endswith(f"layers.{layer}.mlp.down_proj.weight")
        return values * np.float32(factor) if is_it else values

    return change


def unchanged(name: str, values: np.ndarray) -> np.ndarray:
    return values


def swapped(first: int, second: int) -> Mapping[int, int]:
    """Layers that change places."""
    return {first: second, second: first}


def write_version(
    original: Path, out: Path, change: Change = unchanged, moved: Mapping[int, int] | None = None
) -> Path:
    """The model at `original` as float32, changed, as a folder `out`.

    Args:
        moved: layer -> the layer whose place it takes.
    Raises: CheckpointError.
    """
    checkpoint = open_checkpoint(original)
    try:
        source = checkpoint.source
        with CheckpointWriter(out, checkpoint, num_bytes=_float_bytes(checkpoint)) as writer:
            for name in source.names():
                values = np.array(source.read(name), np.float32)
                writer.add_tensor(_moved(name, moved or {}), change(name, values))
            writer.finish(None)
    finally:
        checkpoint.close()
    return out


def _moved(name: str, moved: Mapping[int, int]) -> str:
    return LAYER.sub(lambda found: str(moved.get(int(found[0]), int(found[0]))), name)


def _float_bytes(checkpoint: Checkpoint) -> int:
    infos = (checkpoint.source.info(name) for name in checkpoint.source.names())
    return sum(4 * int(np.prod(info.shape, dtype=np.int64)) for info in infos)
