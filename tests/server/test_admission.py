"""How many get in, and what the others are told; the clock is turned by hand."""

from __future__ import annotations

import pytest

from jaxinfer.errors import InvalidRequest, Overloaded
from jaxinfer.server.admission import Admission
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.service_rate import MAX_RETRY_S, MIN_RETRY_S
from tests.fakes import FakeClock

NORMAL = PriorityClasses().default


def test_a_permit_is_room_until_it_is_released():
    admission = Admission(2, clock=FakeClock())
    first, second = admission.acquire(), admission.acquire()
    with pytest.raises(Overloaded):
        admission.acquire()
    first.release()
    admission.acquire()
    second.release()
    assert admission.num_open == 1


def test_a_permit_is_released_once_however_often_it_is_asked():
    admission = Admission(2)
    permit = admission.acquire()
    permit.settle(NORMAL, 2, param="n")
    permit.release()
    permit.release()
    assert admission.num_open == 0


def test_leaving_the_block_releases_even_after_an_error():
    admission = Admission(1)
    with pytest.raises(RuntimeError), admission.acquire():
        raise RuntimeError
    assert admission.num_open == 0


def test_a_permit_is_settled_wholly_or_not_at_all():
    admission = Admission(3)
    first, second = admission.acquire(), admission.acquire()
    with pytest.raises(Overloaded):
        first.settle(NORMAL, 3, param="n")
    assert admission.num_open == 2
    first.settle(NORMAL, 2, param="n")
    assert admission.num_open == 3
    first.release()
    assert admission.num_open == 1
    second.release()
    assert admission.num_open == 0


def test_what_can_never_fit_is_not_overload():
    with pytest.raises(InvalidRequest, match="at most 3") as caught:
        Admission(3).acquire().settle(NORMAL, 4, param="n")
    assert caught.value.param == "n"


def test_the_time_to_come_back_follows_the_rate_at_which_requests_end():
    clock = FakeClock(100.0)
    admission = Admission(10, clock=clock)
    for _ in range(5):
        permit = admission.acquire()
        clock.now += 2.0
        permit.release()
    assert admission.rate.retry_after_s(1, 0, 0) == pytest.approx(2.0)
    assert admission.rate.retry_after_s(4, 0, 0) == pytest.approx(8.0)


def test_those_refused_before_come_back_before():
    clock = FakeClock(100.0)
    admission = Admission(1, clock=clock)
    admission.acquire().release()
    admission.acquire()
    clock.now += 4.0
    told = []
    for _ in range(3):
        with pytest.raises(Overloaded) as caught:
            admission.acquire()
        told.append(caught.value.retry_after_s)
    assert told == pytest.approx([4.0, 8.0, 12.0])


def test_the_rate_forgets_what_is_older_than_its_window():
    clock = FakeClock(0.0)
    admission = Admission(5, clock=clock)
    admission.acquire().release()
    clock.now = 1.0
    for _ in range(100):
        admission.acquire().release()
    clock.now = 40.0
    assert admission.rate.retry_after_s(1, 0, 0) == pytest.approx(30.0)


@pytest.mark.parametrize(("waited_s", "bound"), [(0.001, MIN_RETRY_S), (1000.0, MAX_RETRY_S)])
def test_the_time_to_come_back_stays_within_a_second_and_a_minute(waited_s: float, bound: float):
    clock = FakeClock(0.0)
    admission = Admission(1, clock=clock)
    admission.acquire()
    clock.now = waited_s
    for _ in range(49 if bound == MAX_RETRY_S else 0):
        with pytest.raises(Overloaded):
            admission.acquire()
    with pytest.raises(Overloaded) as caught:
        admission.acquire()
    assert caught.value.retry_after_s == bound


def test_before_anything_ran_the_shortest_time_is_told():
    assert Admission(1, clock=FakeClock()).rate.retry_after_s(1, 0, 0) == MIN_RETRY_S
