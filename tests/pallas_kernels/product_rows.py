"""What every exact product must do: a row has its bits whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NUM_ROWS = (1, 8, 16, 24, 64, 130)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, as a part of the largest value."""
    assert got.shape == want.shape
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


def assert_rows_are_independent(run: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> None:
    """Rows of x [130, K] in batches of several sizes, at several places, beside extreme rows."""
    want = run(x)
    assert want.dtype == np.float32
    for num_rows in NUM_ROWS:
        start = 130 - num_rows
        np.testing.assert_array_equal(run(x[start:]), want[start:])
    order = np.random.default_rng(1).permutation(len(x))
    np.testing.assert_array_equal(run(x[order]), want[order])
    beside = x.copy()
    beside[1::2] = np.asarray([np.nan, 3e38, -np.inf, 0], x.dtype)[np.arange(65) % 4, None]
    np.testing.assert_array_equal(run(beside)[::2], want[::2])
    np.testing.assert_array_equal(run(beside[:24])[::2], want[:24:2])
