"""A static scale clips what is rare only where that costs less than coarse steps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.quantization.activation_scales import static_scale

ONES = np.ones(4, np.float32)


def test_without_outliers_the_scale_reaches_the_largest():
    rows = np.float32([[1.27, -1.27, 1.27, -1.27]])
    assert static_scale(rows, 1.27, ONES) == pytest.approx(0.01)


def test_one_outlier_among_many_rows_is_clipped():
    rows = np.random.default_rng(0).uniform(-1, 1, (200_000, 4)).astype(np.float32)
    rows[0, 0] = 4
    assert static_scale(rows, 4.0, ONES) < 4 / 127


def test_a_channel_without_weights_decides_nothing():
    rows = np.random.default_rng(0).uniform(-1, 1, (1000, 4)).astype(np.float32)
    rows[:, 0] *= 40
    seen = static_scale(rows, 40.0, ONES)
    assert static_scale(rows, 40.0, np.float32([0, 1, 1, 1])) < seen / 16


def test_inputs_of_zeros_have_a_scale():
    assert static_scale(np.zeros((3, 4), np.float32), 0.0, ONES) == 1.0
