"""Round-to-nearest: a float weight to integers and scales, by itself.

The scales that the other methods begin with come from here too. Numpy only: it runs while a model
loads, on pieces that fit into a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor

LEAST_SCALE = 2.0**-100  # smaller ones are 0: far from what a device may flush to 0
PIECE = 1 << 17  # weights at once
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)  # of a group's reach, tried by the search
LEAST_IMPORTANCE = 1e-3  # of the mean: an input that calibration never met still counts a little


def round_to_nearest(
    weight: np.ndarray,
    kept: WeightFormat,
    *,
    importance: np.ndarray | None = None,
    search_clip: bool = True,
) -> QTensor:
    """Scales for each group, and the nearest integers under them.

    Args:
        weight: float[N, K].
        importance: float[K], what an error at each input counts: the mean of its squares.
        search_clip: see `scales_of`.
    Raises: ValueError for a number that is not finite.
    """
    weight = finite(weight)
    scale, zero = scales_of(weight, kept, importance=importance, search_clip=search_clip)
    return integers_of(weight, scale, zero, kept)


def finite(weight: np.ndarray) -> np.ndarray:
    """As float32. Raises: ValueError for a number that is not finite."""
    weight = np.asarray(weight, np.float32)
    if not np.isfinite(weight).all():
        raise ValueError("expected finite numbers, found NaN or infinity")
    return weight


def levels(kept: WeightFormat) -> tuple[int, int]:
    """The smallest and the largest integer."""
    if not kept.has_zero:
        largest = 2 ** (kept.bits - 1) - 1
        return -largest, largest
    return (-128, 127) if kept.bits == 8 else (0, 15)


def scales_of(
    weight: np.ndarray,
    kept: WeightFormat,
    *,
    importance: np.ndarray | None = None,
    search_clip: bool = True,
) -> tuple[np.ndarray, np.ndarray | None]:
    """float32[G, N] scales and int8[G, N] zero points of a finite float32[N, K].

    Args:
        search_clip: scales of least squared error, which may clip the largest weights, instead of
            those that reach each group's extremes; of 4 bits only.
    """
    search = search_clip and kept.bits == 4
    counts = _counts(importance, kept, weight.shape[1]) if search else None
    groups = kept.groups(weight.shape[1])
    scale = np.zeros((groups, len(weight)), np.float32)
    zero = np.zeros((groups, len(weight)), np.int8)
    for rows in pieces(weight):
        piece = grouped(weight[rows], kept)
        reach = _reach(piece)
        found = _searched(piece / reach, kept, counts) if search else _extremes(piece / reach, kept)
        scale[:, rows] = _sound(found[0] * reach)[..., 0].T
        zero[:, rows] = found[1][..., 0].T
    return scale, zero if kept.has_zero else None


def integers_of(
    weight: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, kept: WeightFormat
) -> QTensor:
    """The nearest integers to a weight under scales and zero points that are given."""
    low, high = levels(kept)
    out = np.empty(weight.shape, np.int8)
    for rows in pieces(weight):
        piece, wide = grouped(weight[rows], kept), scale[:, rows].T[..., None]
        q = np.divide(piece, wide, out=np.zeros_like(piece), where=wide > 0)
        np.rint(q, out=q)
        if zero is not None:
            q += zero[:, rows].T[..., None]
        np.clip(q, low, high, out=q)
        out[rows] = q.reshape(len(q), -1)[:, : weight.shape[1]]
    return QTensor(out, scale, zero, kept)


def pieces(weight: np.ndarray) -> Iterator[slice]:
    """Rows of a weight, about PIECE numbers at a time."""
    step = max(1, PIECE // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def grouped(weight: np.ndarray, kept: WeightFormat) -> np.ndarray:
    """float[N, K] -> [N, G, size]; a shorter last group is filled up with zeros, which every format
    has without an error."""
    num_inputs = weight.shape[1]
    size = kept.group_size or num_inputs
    if num_inputs % size:
        weight = np.pad(weight, ((0, 0), (0, -num_inputs % size)))
    return weight.reshape(len(weight), -1, size)


def _reach(groups: np.ndarray) -> np.ndarray:
    """float32[N, G, 1], the largest magnitudes; 1 for groups whose scale would be 0."""
    reach = np.maximum(groups.max(axis=2), -groups.min(axis=2))[..., None]
    return np.where(reach < LEAST_SCALE, np.float32(1), reach)


def _extremes(groups: np.ndarray, kept: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """float32[N, G, 1] scales and zero points that reach each group's extremes."""
    least = np.minimum(groups.min(axis=2), 0)[..., None]
    most = np.maximum(groups.max(axis=2), 0)[..., None]
    return _between(least, most, kept)


def _between(
    least: np.ndarray, most: np.ndarray, kept: WeightFormat
) -> tuple[np.ndarray, np.ndarray]:
    low, high = levels(kept)
    if not kept.has_zero:
        scale = np.maximum(most, -least) / high
        return scale, np.zeros_like(scale)
    scale = (most - least) / (high - low)
    ratio = np.divide(least, scale, out=np.zeros_like(least), where=scale > 0)
    return scale, np.clip(np.rint(low - ratio), low, high)


def _searched(
    groups: np.ndarray, kept: WeightFormat, counts: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Of least squared error among CLIPS, each with the scale that fits its integers best."""
    low, high = levels(kept)
    least = np.minimum(groups.min(axis=2), 0)[..., None]
    most = np.maximum(groups.max(axis=2), 0)[..., None]
    best, best_zero = _between(least, most, kept)
    best_gain = np.full_like(best, -1)
    counted = groups if counts is None else groups * counts
    for clip in CLIPS:
        scale, zero = _between(least * np.float32(clip), most * np.float32(clip), kept)
        q = np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0)
        np.rint(q, out=q)
        np.clip(q, low - zero, high - zero, out=q)
        along = np.einsum("ngk,ngk->ng", counted, q)[..., None]
        within = np.einsum("ngk,ngk->ng", q if counts is None else q * counts, q)[..., None]
        fitted = np.divide(along, within, out=scale.copy(), where=within > 0)
        better = fitted * along > best_gain  # the error is that of all zeros less this
        best_gain = np.where(better, fitted * along, best_gain)
        best, best_zero = np.where(better, fitted, best), np.where(better, zero, best_zero)
    return best, best_zero


def _counts(
    importance: np.ndarray | None, kept: WeightFormat, num_inputs: int
) -> np.ndarray | None:
    """float32[1, G, size], of mean 1."""
    if importance is None:
        return None
    mean = float(np.mean(importance, dtype=np.float64))
    if not mean > 0:
        return None
    counts = np.maximum(np.asarray(importance, np.float64) / mean, LEAST_IMPORTANCE)
    return grouped(counts.astype(np.float32)[None, :num_inputs], kept)


def _sound(scale: np.ndarray) -> np.ndarray:
    scale = scale.astype(np.float32)
    return np.where(scale < LEAST_SCALE, np.float32(0), scale)
