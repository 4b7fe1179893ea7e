"""Shares, times, schedules and guards as operators type them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.version_fields import GUARDS, guard, schedule, seconds, share


def test_shares_are_parts_or_percents():
    assert [share(t) for t in ("0", "0.1", "10%", "100%", "0.5%")] == [0, 0.1, 0.1, 1, 0.005]


def test_times_have_units():
    assert [seconds(t) for t in ("90", "1.5s", "5m", "2h")] == [90, 1.5, 300, 7200]


def test_a_schedule_leaves_out_what_is_left_out():
    assert schedule("1%:60s:50,5%:5m,0.25") == [
        {"share": 0.01, "hold_s": 60, "min_requests": 50},
        {"share": 0.05, "hold_s": 300},
        {"share": 0.25},
    ]


def test_guards_are_named_and_may_be_off():
    assert guard("max_slowdown=off,max_kl=0.1") == {"max_slowdown": None, "max_kl": 0.1}


def test_the_guards_are_those_of_the_server():
    from jaxinfer.server.version_wire import GuardFields

    assert set(GUARDS) == set(GuardFields.__struct_fields__)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((share, text) for text in ("", "x", "1.5", "-0.1", "101%", "nan", "%")),
        *((seconds, text) for text in ("", "-1", "5d", "1m30s", "inf")),
        *((schedule, text) for text in ("", "1%:", "1%:5:x", "1%:5:2:3", "1%,", "2")),
        *((guard, text) for text in ("", "max_slowdown", "max_slow=1", "max_kl=much")),
    ],
)
def test_anything_else_is_refused_in_words(read: Callable[[str], Any], text: str):
    with pytest.raises(ValueError, match="expected"):
        read(text)
