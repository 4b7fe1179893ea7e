"""The breaker's states: what opens it, who may try, what closes it."""

from __future__ import annotations

import logging

import pytest

from jaxinfer.errors import Unavailable
from jaxinfer.server.circuit_breaker import BreakerState, CircuitBreaker
from tests.fakes import FakeClock

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


def breaker(clock: FakeClock, seen: list[BreakerState] | None = None) -> CircuitBreaker:
    """Opens at 3 failures or 60 s, for 10 s."""
    return CircuitBreaker(
        threshold=3,
        step_timeout_s=60.0,
        open_s=10.0,
        clock=clock,
        on_change=(lambda state: None) if seen is None else seen.append,
    )


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("", CLOSED),
        ("bb", CLOSED),
        ("bbb", OPEN),
        ("bbgbb", CLOSED),
        ("bbgbbb", OPEN),
        ("h", OPEN),
        ("bbbg", OPEN),  # of requests that ran before: the time has not passed
        ("bbb 9", OPEN),
        ("bbb 9b1", HALF_OPEN),  # more failures while it is open change nothing
        ("bbb T", HALF_OPEN),
        ("bbb T g", CLOSED),
        ("bbb T b", OPEN),
        ("bbb T b 9", OPEN),
        ("bbb T b T", HALF_OPEN),
        ("bbb T g bb", CLOSED),
        ("bbb T g bbb", OPEN),
        ("h T h", OPEN),  # it hangs on
        ("h 9 h 9", OPEN),
        ("h 9 h T", HALF_OPEN),
        ("h T g", CLOSED),
        ("h T b", OPEN),
    ],
)
def test_a_row_of_events_leads_to(events: str, state: BreakerState):
    """b: a step failed, g: one was read, h: one hangs; 1, 9, T: so many seconds (10) pass."""
    clock = FakeClock()
    one = breaker(clock)
    for event in events.replace(" ", ""):
        if event in "bg":
            one.note_step(event == "g")
        elif event == "h":
            one.look(60.5)
        else:
            clock.now += 10 if event == "T" else int(event)
    assert one.look(1.0) is state


def test_closed_it_lets_everybody_in():
    one = breaker(FakeClock())
    with one.let_in(0.0), one.let_in(0.0), one.let_in(0.0):
        assert one.refusal() is None


def test_open_it_tells_when_to_come_back():
    clock = FakeClock()
    one = breaker(clock)
    for _ in range(3):
        one.note_step(False)
    clock.now = 4.0
    with pytest.raises(Unavailable) as caught, one.let_in(0.0):
        pass
    assert (caught.value.code, caught.value.retry_after_s) == ("breaker_open", 6.0)
    clock.now = 9.9
    refusal = one.refusal()
    assert refusal is not None
    assert refusal.retry_after_s == 1.0


def test_a_hang_is_seen_by_who_wants_to_come_in():
    one = breaker(FakeClock())
    with pytest.raises(Unavailable), one.let_in(61.0):
        pass
    assert one.state is OPEN


def test_half_open_it_lets_in_one_at_a_time():
    clock = FakeClock()
    one = breaker(clock)
    one.look(61.0)
    clock.now = 10.0
    with one.let_in(0.0):
        with pytest.raises(Unavailable) as caught, one.let_in(0.0):
            pass
        assert caught.value.retry_after_s == 1.0
    with one.let_in(0.0):  # the first ended without a step
        one.note_step(True)
        with one.let_in(0.0), one.let_in(0.0):
            assert one.state is CLOSED


def test_a_probe_that_is_refused_later_makes_room_for_the_next():
    clock = FakeClock()
    one = breaker(clock)
    one.look(61.0)
    clock.now = 10.0
    for _ in range(2):
        with pytest.raises(ValueError, match="bad body"), one.let_in(0.0):
            raise ValueError("bad body")


def test_a_probe_of_an_earlier_time_keeps_nobody_out_and_its_end_lets_nobody_in():
    clock = FakeClock()
    one = breaker(clock)

    def half_open() -> None:
        for _ in range(3):
            one.note_step(False)
        clock.now += 10.0

    half_open()
    earlier = one.let_in(0.0)
    earlier.__enter__()
    one.note_step(True)
    half_open()
    with one.let_in(0.0):
        earlier.__exit__(None, None, None)
        with pytest.raises(Unavailable), one.let_in(0.0):
            pass


def test_each_change_is_told_and_logged_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "jaxinfer")
    clock, seen = FakeClock(), list[BreakerState]()
    one = breaker(clock, seen)
    for _ in range(5):
        one.note_step(False)
    clock.now = 10.0
    for _ in range(2):
        one.look(0.0)
        one.note_step(True)
    assert seen == [OPEN, HALF_OPEN, CLOSED]
    assert [record.getMessage() for record in caplog.records] == [
        "circuit breaker: closed -> open (3 steps in a row failed)",
        "circuit breaker: open -> half-open (10 s have passed)",
        "circuit breaker: half-open -> closed (a step was read)",
    ]
