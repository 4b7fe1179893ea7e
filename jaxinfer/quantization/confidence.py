"""How sure a mean over tokens of text is: 95 % intervals by a block bootstrap.

Errors of neighbouring tokens resemble each other, so not tokens are drawn but blocks of them in a
row (Künsch 1989): a mean over n tokens is less sure than over n independent ones. Pure arithmetic.
"""

from __future__ import annotations

import numpy as np

BLOCK = 128  # tokens: about a paragraph, beyond which a text's difficulty has changed
NUM_DRAWS = 2000
LOW, HIGH = 2.5, 97.5  # percentiles


def blocks_of(num_windows: int, num_tokens: int) -> int:
    """Blocks that windows of so many tokens are cut into."""
    return num_windows * -(-num_tokens // BLOCK)


def interval(values: np.ndarray, *, seed: int) -> tuple[float, float]:
    """Bounds of the mean of float64[W, T], W windows of T tokens in a row.

    The same seed draws the same blocks, whatever the values: intervals of two models are over
    the same texts.
    Raises: ValueError for fewer than two blocks.
    """
    starts = range(0, values.shape[1], BLOCK)
    sums = np.add.reduceat(values, starts, axis=1).ravel()
    counts = np.add.reduceat(np.ones_like(values), starts, axis=1).ravel()
    if len(sums) < 2:
        raise ValueError(f"an interval needs two blocks of {BLOCK} tokens or two windows")
    drawn = np.random.default_rng(seed).integers(len(sums), size=(NUM_DRAWS, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, (LOW, HIGH))
    return float(low), float(high)
