"""How many get in, and what the others are told; the clock is turned by hand."""

from __future__ import annotations

import pytest

from jaxinfer.errors import EngineFailure, InvalidRequest, Overloaded
from jaxinfer.server.admission import Admission, Permit
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.service_rate import MAX_RETRY_S, MIN_RETRY_S
from jaxinfer.server.time_limits import TimeLimits
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


INTERACTIVE, _, BATCH = PriorityClasses().classes


def fill(admission: Admission, asked: PriorityClass) -> int:
    """Takes seats until there are none; returns how many."""
    for number in range(1000):
        try:
            admission.acquire(asked)
        except Overloaded:
            return number
    raise AssertionError("no bound")


def test_the_last_seats_are_for_better_classes():
    admission = Admission(16, clock=FakeClock())
    assert fill(admission, BATCH) == 12
    assert fill(admission, NORMAL) == 2
    assert fill(admission, INTERACTIVE) == 2
    assert admission.num_open == 16
    assert [admission.num_open_of(c.name) for c in (INTERACTIVE, NORMAL, BATCH)] == [2, 2, 12]


def test_at_most_half_of_the_seats_are_kept_however_many_classes_there_are():
    classes = PriorityClasses(tuple(PriorityClass(f"c{i}", i) for i in range(16)), "c0")
    admission = Admission(30, classes=classes, clock=FakeClock())
    assert fill(admission, classes.classes[-1]) == 15


def test_a_class_has_a_cap_of_its_own():
    capped = PriorityClass("normal", 0, max_requests=2)
    classes = PriorityClasses((INTERACTIVE, capped, BATCH))
    admission = Admission(16, classes=classes, clock=FakeClock())
    assert fill(admission, capped) == 2
    with pytest.raises(Overloaded, match="2 requests of class 'normal'"):
        admission.acquire(capped)
    assert fill(admission, BATCH) == 10
    with pytest.raises(InvalidRequest, match="at most 2"):
        admission.acquire(INTERACTIVE).settle(capped, 3, param="n")


def test_a_request_whose_class_is_not_known_yet_is_judged_by_the_best_it_may_be():
    admission = Admission(16, clock=FakeClock())
    fill(admission, NORMAL)
    with pytest.raises(Overloaded):
        admission.acquire(NORMAL)
    undecided = admission.acquire(NORMAL, best=INTERACTIVE)
    with pytest.raises(Overloaded):
        undecided.settle(NORMAL, 1, param="n")
    undecided.settle(INTERACTIVE, 1, param="n")
    assert admission.num_open_of("interactive") == 1
    undecided.release()
    assert admission.num_open_of("interactive") == 0


def settled(admission: Admission, num_tokens: int, num_prompt_tokens: int = 10) -> Permit:
    permit = admission.acquire()
    permit.settle(NORMAL, 1, param="n", num_tokens=num_tokens)
    permit.charge(num_prompt_tokens)
    return permit


def test_open_tokens_are_bounded_and_fall_as_tokens_come():
    admission = Admission(99, max_tokens=800, clock=FakeClock())  # 700 for the class normal
    first = settled(admission, 300, 100)
    assert admission.open_tokens_of("normal") == 400
    with pytest.raises(Overloaded, match="400 tokens are open and this call may take 301"):
        settled(admission, 300, 1)
    first.produced(100)
    second = settled(admission, 300, 1)
    assert admission.open_tokens_of("normal") == 601
    first.release()
    second.release()
    assert admission.open_tokens_of("normal") == 0


def test_a_call_larger_than_the_bound_of_tokens_gets_in_alone():
    admission = Admission(99, max_tokens=100, clock=FakeClock())
    large = settled(admission, 1000)
    with pytest.raises(Overloaded):
        settled(admission, 1, 1)
    large.release()
    settled(admission, 1, 1)


def test_the_time_to_come_back_for_tokens_follows_the_rate_at_which_they_end():
    clock = FakeClock(100.0)
    admission = Admission(99, max_tokens=800, clock=clock)
    first = settled(admission, 700, 0)
    clock.now += 10.0
    first.produced(100)
    with pytest.raises(Overloaded) as caught:  # 600 open + 300 - 700 allowed, 10 a second
        settled(admission, 200, 100)
    assert caught.value.retry_after_s == pytest.approx(20.0)


def busy(clock: FakeClock) -> Admission:
    """One seat, taken for 10 s more at 10 tokens a second."""
    admission = Admission(99, num_seats=1, clock=clock)
    running = settled(admission, 200)
    for _ in range(100):
        clock.now += 0.1
        running.produced(1)
    return admission


def test_a_call_that_could_not_end_in_time_is_refused_at_once():
    admission = busy(FakeClock(100.0))
    permit = admission.acquire()
    with pytest.raises(Overloaded, match=r"finished in about 1.* has 12\.0 s") as caught:
        permit.settle(NORMAL, 1, param="n", num_tokens=10, limits=TimeLimits(12.0))
    assert caught.value.code == "deadline"
    assert 1 <= caught.value.retry_after_s <= 60
    permit.settle(NORMAL, 1, param="n", num_tokens=10, limits=TimeLimits(14.5))


def test_a_call_that_could_not_begin_in_time_is_refused_before_its_body_is_read():
    admission = busy(FakeClock(100.0))
    for limits in (TimeLimits(None, 9.0), TimeLimits(9.0)):
        with pytest.raises(Overloaded) as caught:
            admission.acquire(limits=limits)
        assert caught.value.code == "deadline"
    assert admission.num_open == 1
    admission.acquire(limits=TimeLimits(None, 13.0))


def test_without_a_time_limit_nobody_is_refused_for_time():
    admission = busy(FakeClock(100.0))
    admission.acquire().settle(NORMAL, 1, param="n", num_tokens=10**6)


def test_what_was_refused_does_not_count_as_served():
    clock = FakeClock(100.0)
    admission = Admission(1, clock=clock)
    for _ in range(50):
        with pytest.raises(InvalidRequest), admission.acquire():
            raise InvalidRequest("no")
    clock.now += 10.0
    assert admission.rate.retry_after_s(1, 0, 0) == pytest.approx(10.0)


def test_a_better_class_does_not_queue_behind_the_refused_of_a_worse_one():
    clock = FakeClock(100.0)
    admission = Admission(1, clock=clock)
    admission.acquire(BATCH).release()
    admission.acquire(BATCH)
    clock.now += 2.0
    for _ in range(5):
        with pytest.raises(Overloaded):
            admission.acquire(BATCH)
    assert admission.rate.retry_after_s(1, 0, BATCH.priority) == pytest.approx(12.0)
    assert admission.rate.retry_after_s(1, 0, INTERACTIVE.priority) == pytest.approx(2.0)


def test_a_failed_call_frees_its_seat_and_proves_nothing_of_the_servers_speed():
    clock = FakeClock(100.0)
    admission = busy(clock)
    before = admission.forecast.estimate(0, 100)
    failing = admission.acquire()
    failing.settle(NORMAL, 1, param="n", num_tokens=10**6)
    failing.produced(1)
    failing.fail(EngineFailure("a step failed"))
    assert admission.num_open == 1
    assert before is not None
    after = admission.forecast.estimate(0, 100)
    assert after is not None
    assert after.run_s == pytest.approx(before.run_s, rel=0.05)


def test_a_permit_that_is_settled_again_has_given_back_what_it_had():
    admission = Admission(99, max_tokens=800, clock=FakeClock())
    permit = settled(admission, 300, 100)
    permit.settle(NORMAL, 2, param="n", num_tokens=50)
    assert (admission.num_open, admission.open_tokens_of("normal")) == (2, 0)
    permit.charge(10)
    assert admission.open_tokens_of("normal") == 110
    assert admission.forecast.num_waiting(NORMAL.priority) == 1
    permit.release()
    assert (admission.num_open, admission.open_tokens_of("normal")) == (0, 0)
    assert admission.forecast.num_waiting(NORMAL.priority) == 0
