"""The smallest limit wins, and what is no time is refused by name."""

from __future__ import annotations

import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.server.time_limits import NO_LIMITS, TimeLimits, asked_limits


def test_the_smaller_of_each_limit_counts():
    server, of_class = TimeLimits(60.0, None), TimeLimits(30.0, 5.0)
    assert server.within(of_class) == TimeLimits(30.0, 5.0)
    assert server.within(of_class).within(asked_limits(90.0, "10")) == TimeLimits(10.0, 5.0)
    assert NO_LIMITS.within(NO_LIMITS) == NO_LIMITS


def test_limits_become_moments_of_the_clock():
    assert TimeLimits(10.0, 2.0).deadlines(100.0) == (110.0, 102.0)
    assert NO_LIMITS.deadlines(100.0) == (None, None)
    assert TimeLimits(10.0, 2.0).after(3.0) == TimeLimits(7.0, -1.0)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "", "1e999", "x" * 500])
def test_a_header_that_is_no_time_is_refused(text: str):
    with pytest.raises(InvalidRequest, match="seconds above 0") as caught:
        asked_limits(None, text)
    assert caught.value.param == "x-request-timeout"
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_field_that_is_no_time_is_refused(value: float):
    with pytest.raises(InvalidRequest) as caught:
        asked_limits(value, None)
    assert caught.value.param == "timeout"
