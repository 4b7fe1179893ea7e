"""Work in the background rests as long as it works."""

from __future__ import annotations

import pytest

from jaxinfer.runtime.pace import MAX_REST_S, Pace


def test_each_rest_is_as_long_as_the_work_before_it_and_never_long():
    now, rests = 5.0, list[float]()
    pace = Pace(clock=lambda: now, sleep=rests.append)
    for seconds in (0.125, 0.0, 0.0625, 60.0):
        now += seconds
        pace.rest()
    assert rests == pytest.approx([0.125, 0.0, 0.0625, MAX_REST_S])
