"""Scales per channel of the keys, for a cache that rounds each key by its own largest magnitude.

A key's rounding error is the same in all of its channels; its largest channel decides it. So large
channels are divided, and the queries multiplied, as far as the scores gain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
EXPONENTS = np.linspace(0, 1, 11)


def key_scales(queries: Floats, keys: Floats) -> Floats:
    """What keys are to be divided by, for the least error of the scores.

    Rotation mixes channels d and d + D/2, so they share a scale, and only their joint magnitude
    counts: it is the same before and after.

    Args:
        queries: float32[T, H, D], before or after rotation.
        keys: float32[T, K, D]; H is a multiple of K.
    Returns: float32[K, D], of geometric mean 1 over a head; ones for a head of zeros.
    """
    num_heads = keys.shape[1]
    by_head = _pairs(queries).reshape(len(queries), num_heads, -1, keys.shape[2] // 2)
    weight = np.square(by_head).mean(axis=(0, 2))
    magnitudes = _pairs(keys)
    scales = [_of_head(magnitudes[:, k], weight[k]) for k in range(num_heads)]
    return np.concatenate([np.array(scales)] * 2, axis=1).astype(np.float32)


def _pairs(x: Floats) -> Floats:
    """[T, heads, D] -> [T, heads, D/2]"""
    first, second = np.split(x, 2, axis=2)
    return np.sqrt(np.square(first) + np.square(second))


def _of_head(keys: Floats, weight: Floats) -> Floats:
    """float32[T, D/2] magnitudes and what an error weighs in each pair -> float32[D/2]."""
    largest = keys.max(axis=0)
    if not largest.all():
        return np.ones_like(largest)
    logs = np.log(largest)
    candidates = [np.exp(a * (logs - logs.mean())) for a in EXPONENTS]
    errors = [
        (weight * np.square(s)).sum() * np.square((keys / s).max(axis=1)).mean() for s in candidates
    ]
    return candidates[int(np.argmin(errors))]
