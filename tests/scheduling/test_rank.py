"""Tests of who comes first, and what a class is worth."""

from __future__ import annotations

import pytest

from jaxinfer.scheduling.rank import aging_bound_s, rank_of
from jaxinfer.scheduling.request import Request


def rank(arrival_s: float, priority: int, number: int = 1) -> tuple[float, int]:
    return rank_of(Request("r", (1,), arrival_s=arrival_s, priority=priority), number)


def test_inside_a_class_it_is_first_come_first_served():
    assert rank(1.0, 0) < rank(2.0, 0)
    assert rank(1.0, 0, 1) < rank(1.0, 0, 2)


@pytest.mark.parametrize(("priority", "better", "bound_s"), [(1, -1, 60), (1, 0, 30), (0, -1, 30)])
def test_a_better_class_overtakes_within_the_bound_and_no_longer(priority, better, bound_s):
    assert aging_bound_s(priority, better) == bound_s
    old = rank(100.0, priority)
    assert rank(100.0 + bound_s - 0.1, better) < old < rank(100.0 + bound_s + 0.1, better)
