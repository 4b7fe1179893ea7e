"""Scales per channel of the keys, for a cache that rounds each key by its own largest magnitude.

A key's rounding error is the same in all of its channels; its largest channel decides it. So large
channels are divided, and the queries multiplied, as far as the scores gain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
EXPONENTS = np.linspace(0, 1, 11)


def key_scales(queries: Floats, keys: Floats, *, rotary_dim: int) -> Floats:
    """What keys are to be divided by, for the least error of the scores.

    Rotation mixes channels d and d + R/2 of the first R, so they share a scale, and only their
    joint magnitude counts: it is the same before and after. The others stand alone.

    Args:
        queries: float32[T, H, D], before or after rotation.
        keys: float32[T, K, D]; H is a multiple of K.
        rotary_dim: R.
    Returns: float32[K, D], of geometric mean 1 over a head's pairs and single channels; ones for a
        head of zeros.
    """
    num_heads, magnitudes = keys.shape[1], _magnitudes(keys, rotary_dim)
    by_head = _magnitudes(queries, rotary_dim).reshape(
        len(queries), num_heads, -1, magnitudes.shape[2]
    )
    weight = np.square(by_head).mean(axis=(0, 2))
    scales = np.array([_of_head(magnitudes[:, k], weight[k]) for k in range(num_heads)])
    pairs, alone = np.split(scales, [rotary_dim // 2], axis=1)
    return np.concatenate([pairs, pairs, alone], axis=1).astype(np.float32)


def _magnitudes(x: Floats, rotary_dim: int) -> Floats:
    """[T, heads, D] -> [T, heads, D - R/2]: of pairs, then of channels that stand alone."""
    first, second, alone = np.split(x, [rotary_dim // 2, rotary_dim], axis=2)
    return np.concatenate([np.sqrt(np.square(first) + np.square(second)), np.abs(alone)], axis=2)


def _of_head(keys: Floats, weight: Floats) -> Floats:
    """float32[T, n] magnitudes and what an error weighs in each of n -> float32[n]."""
    largest = keys.max(axis=0)
    if not largest.all():
        return np.ones_like(largest)
    logs = np.log(largest)
    candidates = [np.exp(a * (logs - logs.mean())) for a in EXPONENTS]
    errors = [
        (weight * np.square(s)).sum() * np.square((keys / s).max(axis=1)).mean() for s in candidates
    ]
    return candidates[int(np.argmin(errors))]
