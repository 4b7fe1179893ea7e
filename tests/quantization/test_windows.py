"""Samples become windows of a few lengths; nothing real is lost or counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.calibration_set import CalibrationSet, Sample
from jaxinfer.quantization.windows import MAX_ROWS, windows_of
from tests.quantization.calibration_world import random_set


def test_a_window_is_filled_up_to_the_next_length():
    calibration = random_set({"short": [3, 64, 65]})
    windows = windows_of(calibration, bos=None, max_length=640, seed=0)
    assert [len(window.token_ids) for window in windows] == [64, 64, 128]
    assert [window.num_tokens for window in windows] == [3, 64, 65]
    first = calibration.samples[0].token_ids
    assert tuple(windows[0].token_ids[:3]) == first
    assert not windows[0].token_ids[3:].any()


def test_the_rest_of_a_long_sample_begins_with_bos_again():
    sample = Sample("long", tuple(range(7, 7 + 130)))
    windows = windows_of(CalibrationSet.of("one", [sample]), bos=1, max_length=64, seed=0)
    assert [window.num_tokens for window in windows] == [64, 64, 4]
    assert [window.token_ids[0] for window in windows] == [7, 1, 1]
    real = np.concatenate([window.token_ids[: window.num_tokens] for window in windows])
    assert tuple(real[real != 1]) == sample.token_ids


def test_every_eighth_sample_of_a_kind_is_held():
    calibration = random_set({"short": [5] * 16, "long": [9] * 8})
    windows = windows_of(calibration, bos=None, max_length=640, seed=0)
    assert sorted(window.num_tokens for window in windows if window.is_held) == [5, 5, 9]


def test_rows_are_distinct_real_tokens_of_all_windows():
    lengths = [200, 3, 1000, 1024, 700]
    windows = windows_of(random_set({"long": lengths}), bos=None, max_length=4096, seed=3)
    assert sum(len(window.rows) for window in windows) == MAX_ROWS
    for window in windows:
        assert len(set(window.rows.tolist())) == len(window.rows)
        assert all(0 <= row < window.num_tokens for row in window.rows)
    few = windows_of(random_set({"long": [5, 6]}), bos=None, max_length=4096, seed=3)
    assert [window.rows.tolist() for window in few] == [[*range(5)], [*range(6)]]


def test_a_set_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="no tokens"):
        windows_of(CalibrationSet.of("empty.jsonl", []), bos=None, max_length=640, seed=0)
