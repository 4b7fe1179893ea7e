"""Two works at once, and the end of both when one fails."""

from __future__ import annotations

import threading

import pytest

from jaxinfer.runtime.together import Together


def test_both_run_at_once_and_give_their_results():
    meeting = threading.Barrier(2, timeout=5)

    def work(result: int) -> int:
        meeting.wait()
        return result

    assert Together().run(lambda: work(1), lambda: work(2)) == (1, 2)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_error_ends_the_other_work_and_is_raised(is_first: bool):
    both, rounds, has_failed = Together(), [0], threading.Event()

    def fail() -> None:
        has_failed.set()
        raise ValueError("no room")

    def go_on() -> None:
        has_failed.wait(5)
        while rounds[0] < 5000:
            both.check("a name")
            rounds[0] += 1
            threading.Event().wait(0.001)

    works = (fail, go_on) if is_first else (go_on, fail)
    with pytest.raises(ValueError, match="no room"):
        both.run(*works)
    assert rounds[0] < 5000


def test_the_later_error_of_two_is_not_in_the_way():
    both, has_failed = Together(), threading.Event()

    def first() -> None:
        has_failed.set()
        raise ValueError("first")

    def second() -> None:
        has_failed.wait(5)
        raise KeyError("second")

    with pytest.raises((ValueError, KeyError)):
        both.run(first, second)


def test_nothing_is_ended_while_all_goes_well():
    both = Together()
    assert both.run(lambda: both.check(), lambda: 5) == (None, 5)
    both.check()
