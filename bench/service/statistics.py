"""Figures of a run: percentiles, and the slope of a line through samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float:
    """NaN of none."""
    return float(np.percentile(values, percent)) if values else float("nan")


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the middle line: the median of the slopes between all pairs (Theil-Sen), which a few odd
    samples do not move. 0 of fewer than two places.
    """
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    i, j = np.triu_indices(len(x), 1)
    run = x[j] - x[i]
    return float(np.median((y[j] - y[i])[run != 0] / run[run != 0])) if run.any() else 0.0
