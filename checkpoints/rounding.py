"""Round-to-nearest: a float weight to integers and scales, by itself, without data."""

from __future__ import annotations

import numpy as np

from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor, spread

LEAST_SCALE = 2.0**-100  # smaller ones are 0: far from what a device may flush to 0


def round_to_nearest(weight: np.ndarray, kept: WeightFormat) -> QTensor:
    """float[N, K] -> its QTensor: scales from each group's extremes, integers to the nearest.

    Raises: ValueError for a number that is not finite.
    """
    weight = weight.astype(np.float32)
    if not np.isfinite(weight).all():
        raise ValueError("expected finite numbers, found NaN or infinity")
    scale, zero = scales_of(weight, kept)
    return integers_of(weight, scale, zero, kept)


def levels(kept: WeightFormat) -> tuple[int, int]:
    """The smallest and the largest integer."""
    if not kept.has_zero:
        largest = 2 ** (kept.bits - 1) - 1
        return -largest, largest
    return (-128, 127) if kept.bits == 8 else (0, 15)


def scales_of(weight: np.ndarray, kept: WeightFormat) -> tuple[np.ndarray, np.ndarray | None]:
    """float32[G, N] scales that reach each group's extremes, and int8[G, N] zero points."""
    low, high = levels(kept)
    groups = grouped(weight, kept)
    if not kept.has_zero:
        return _sound(np.abs(groups).max(axis=2).T / high), None
    least, most = np.minimum(groups.min(axis=2), 0).T, np.maximum(groups.max(axis=2), 0).T
    scale = _sound((most - least) / (high - low))
    ratio = np.divide(least, scale, out=np.zeros_like(least), where=scale > 0)
    return scale, np.clip(np.rint(low - ratio), low, high).astype(np.int8)


def integers_of(
    weight: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, kept: WeightFormat
) -> QTensor:
    """The nearest integers to a weight under scales and zero points that are given."""
    low, high = levels(kept)
    wide = spread(scale, kept, weight.shape[1])
    q = np.divide(weight, wide, out=np.zeros_like(weight), where=wide > 0)
    np.rint(q, out=q)
    if zero is not None:
        q += spread(zero, kept, weight.shape[1])
    np.clip(q, low, high, out=q)
    return QTensor(q.astype(np.int8), scale, zero, kept)


def grouped(weight: np.ndarray, kept: WeightFormat) -> np.ndarray:
    """float[N, K] -> [N, G, size]; a shorter last group is filled up by its own last input."""
    num_inputs = weight.shape[1]
    size = kept.group_size or num_inputs
    filled = np.pad(weight, ((0, 0), (0, -num_inputs % size)), mode="edge")
    return filled.reshape(len(weight), -1, size)


def _sound(scale: np.ndarray) -> np.ndarray:
    scale = scale.astype(np.float32)
    return np.where(scale < LEAST_SCALE, np.float32(0), scale)
