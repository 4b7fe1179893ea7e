from __future__ import annotations

import math

import pytest

from bench.service.statistics import percentile, slope


def test_the_slope_of_a_line_is_found_though_a_sample_is_far_off():
    assert slope([0, 1, 2, 3, 4, 5, 6], [5, 7, 9, 1000, 13, 15, 17]) == pytest.approx(2.0)


def test_a_level_line_has_no_slope():
    assert slope([1, 2, 3], [4, 4, 4]) == 0.0


@pytest.mark.parametrize("xs", [[], [3], [3, 3]])
def test_what_lies_at_one_place_has_no_slope(xs: list[float]):
    assert slope(xs, [1.0 * i for i in range(len(xs))]) == 0.0


def test_a_percentile_of_nothing_is_no_number():
    assert math.isnan(percentile([], 50))
    assert percentile([1, 2, 9], 50) == 2
