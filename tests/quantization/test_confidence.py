"""Intervals that hold what they promise, and that know that neighbours resemble each other."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.quantization.confidence import BLOCK, blocks_of, interval


def test_equal_values_leave_no_doubt():
    assert interval(np.full((4, 2 * BLOCK), 2.5), seed=0) == (2.5, 2.5)


def test_the_same_seed_gives_the_same_interval_and_another_nearly():
    values = np.random.default_rng(1).exponential(size=(20, 512))
    assert interval(values, seed=3) == interval(values, seed=3)
    assert interval(values, seed=3) != interval(values, seed=4)
    assert interval(values, seed=3) == pytest.approx(interval(values, seed=4), rel=0.01)


@pytest.mark.parametrize("shape", [(1, 2 * BLOCK), (2, 10), (1, BLOCK + 1)])
def test_two_blocks_are_enough(shape: tuple[int, int]):
    values = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    low, high = interval(values, seed=0)
    assert low < values.mean() < high


def test_one_block_is_refused():
    assert blocks_of(1, BLOCK) == 1
    with pytest.raises(ValueError, match="two blocks"):
        interval(np.ones((1, BLOCK)), seed=0)


def test_independent_values_get_the_interval_of_the_normal_law():
    values = np.random.default_rng(0).normal(size=(40, 512))
    low, high = interval(values, seed=0)
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(values.size), rel=0.2)


def test_values_that_come_in_runs_are_less_sure():
    rng = np.random.default_rng(0)
    independent = rng.normal(size=(40, 512))
    runs = np.repeat(rng.normal(size=(40, 16)), 32, axis=1)  # as many, 32 equal ones in a row
    width = {
        name: np.diff(interval(values, seed=0))[0]
        for name, values in (("independent", independent), ("runs", runs))
    }
    assert width["runs"] > 4 * width["independent"]


def test_about_95_in_100_intervals_hold_the_truth():
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(100):
        runs = np.repeat(rng.exponential(size=(20, 64)), 8, axis=1)  # of mean 1
        low, high = interval(runs, seed=0)
        held += low <= 1.0 <= high
    assert 88 <= held <= 99
