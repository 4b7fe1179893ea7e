"""Channels far above the median are named, the farthest first."""

from __future__ import annotations

import numpy as np

from jaxinfer.quantization.outliers import Outliers, outliers_of


def test_channels_above_the_ratio_are_outliers():
    found = outliers_of("layers.0.mlp.down_proj", np.array([1, 1, 50, 20, 1, 21, 1, 1], np.float32))
    assert found == Outliers("layers.0.mlp.down_proj", (2, 5), (50.0, 21.0))


def test_a_site_of_zeros_has_none():
    assert outliers_of("x", np.zeros(4, np.float32)).channels == ()
