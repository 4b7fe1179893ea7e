"""How long an idle engine waits, with a clock that is turned by hand."""

from __future__ import annotations

import pytest

from jaxinfer.batch_window import BatchWindow
from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.request import Request


def request(num_tokens: int = 3, n: int = 1) -> Request:
    return Request("r", (1,) * num_tokens, SamplingParams(n=n))


def opened() -> BatchWindow:
    window = BatchWindow(0.5, max_tokens=10, max_seqs=4)
    window.open()
    return window


def test_nothing_is_waited_for_before_something_has_come():
    assert opened().left_s(100.0) == 0.0


def test_the_window_begins_with_the_first_and_later_ones_do_not_prolong_it():
    window = opened()
    window.add(request(), 100.0)
    assert window.left_s(100.0) == pytest.approx(0.5)
    window.add(request(), 100.25)
    assert window.left_s(100.25) == pytest.approx(0.25)
    assert window.left_s(101.0) == 0.0


@pytest.mark.parametrize("filling", [[request(10)], [request(6), request(4)], [request(1, n=4)]])
def test_what_fills_a_step_is_not_kept_waiting(filling: list[Request]):
    window = opened()
    for each in filling:
        window.add(each, 100.0)
    assert window.left_s(100.0) == 0.0


def test_each_idle_time_has_its_own_window():
    window = opened()
    window.add(request(10), 100.0)
    window.open()
    window.add(request(), 200.0)
    assert window.left_s(200.0) == pytest.approx(0.5)


def test_without_a_window_nobody_waits():
    window = BatchWindow()
    window.open()
    window.add(request(0), 100.0)
    assert window.left_s(100.0) == 0.0
