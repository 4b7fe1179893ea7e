"""Channels far above the median are named, the farthest first."""

from __future__ import annotations

import numpy as np

from jaxinfer.quantization.outliers import Outliers, line_of, outliers_of


def test_channels_above_the_ratio_are_outliers():
    found = outliers_of("layers.0.mlp.down_proj", np.float32([1, 1, 50, 20, 1, 21, 1, 1]))
    assert found == Outliers("layers.0.mlp.down_proj", (2, 5), (50.0, 21.0))


def test_a_site_of_zeros_has_none():
    assert outliers_of("x", np.zeros(4, np.float32)).channels == ()


def test_the_line_counts_them_and_names_the_farthest():
    found = [Outliers("a", (), ()), Outliers("b", (7,), (30.0,)), Outliers("c", (1, 2), (99.6, 21))]
    assert line_of(found) == (
        "3 channels at 2 sites are above 20 times their site's median; "
        "the farthest is channel 1 of c, 100 times"
    )
    assert line_of(found[:1]) == "no channel is above 20 times its site's median"
