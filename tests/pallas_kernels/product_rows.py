"""What every exact product must do: a row has its bits whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

NUM_ROWS = 130


def relative_error(got: Any, want: np.ndarray) -> float:
    """The largest difference, as a part of the largest value."""
    assert got.shape == want.shape
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


def assert_rows_are_independent(
    run: Callable[[np.ndarray], Any], x: np.ndarray, batches: tuple[int, ...]
) -> None:
    """Rows of x [NUM_ROWS, K] in smaller batches, at other places, and beside extreme rows."""
    want = np.asarray(run(x))
    assert want.dtype == np.float32
    for num_rows in batches:
        start = NUM_ROWS - num_rows
        np.testing.assert_array_equal(run(x[start:]), want[start:])
    order = np.random.default_rng(1).permutation(NUM_ROWS)
    np.testing.assert_array_equal(run(x[order]), want[order])
    beside = x.copy()
    extremes = np.asarray([np.nan, 3e38, -np.inf, 0], x.dtype)
    beside[1::2] = extremes[np.arange(NUM_ROWS // 2) % 4, None]
    np.testing.assert_array_equal(np.asarray(run(beside))[::2], want[::2])
    few = max(batches)
    np.testing.assert_array_equal(np.asarray(run(beside[:few]))[::2], want[:few:2])
