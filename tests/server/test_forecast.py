"""When a request would be served, with numbers that can be worked out by hand."""

from __future__ import annotations

import pytest

from jaxinfer.scheduling.rank import AGING_S
from jaxinfer.server.forecast import MAX_FACTOR, MIN_FACTOR, UNPROVEN_FACTOR, Forecast, Ticket
from tests.fakes import FakeClock

BEST, NORMAL, WORST = -1, 0, 1


class Scene:
    """Two seats, and a clock that is turned by hand."""

    def __init__(self, num_seats: int | None = 2):
        self.clock = FakeClock(100.0)
        self.forecast = Forecast(num_seats, clock=self.clock)

    def enter(self, priority: int, num_seats: int, num_tokens: int) -> Ticket:
        estimate = self.forecast.estimate(priority, num_tokens / num_seats)
        return self.forecast.enter(priority, num_seats, num_tokens, estimate)

    def run(self, seconds: float, *tickets: Ticket, tokens: int) -> None:
        """Each gets so many tokens, spread over the time."""
        for _ in range(tokens):
            self.clock.now += seconds / tokens
            for ticket in tickets:
                self.forecast.produced(ticket, 1)

    def running(self, *, priority: int = NORMAL, num_tokens: int = 101) -> Ticket:
        ticket = self.enter(priority, 1, num_tokens)
        self.forecast.produced(ticket, 1)
        return ticket

    def busy(self, num_tokens: int = 101) -> tuple[Ticket, Ticket]:
        """Both seats are taken, by default for 5 more seconds, at 10 tokens a second each."""
        pair = self.running(num_tokens=num_tokens), self.running(num_tokens=num_tokens)
        self.run(5.0, *pair, tokens=50)
        return pair

    def wait_s(self, priority: int = NORMAL) -> float:
        estimate = self.forecast.estimate(priority, 10)
        assert estimate is not None
        return estimate.wait_s


def test_before_anything_was_measured_nothing_is_said():
    scene = Scene()
    assert scene.forecast.estimate(NORMAL, 10) is None
    scene.enter(NORMAL, 1, 10)
    assert scene.forecast.estimate(NORMAL, 10) is None


def test_running_takes_the_tokens_at_the_speed_of_a_seat():
    scene = Scene()
    scene.run(5.0, scene.running(), tokens=50)
    estimate = scene.forecast.estimate(NORMAL, 20)
    assert estimate is not None
    assert estimate.wait_s == 0
    assert estimate.run_s == pytest.approx(2.0, rel=0.03)
    assert estimate.factor == MIN_FACTOR


def test_with_the_seats_taken_one_waits_for_the_first_to_end():
    scene = Scene()
    scene.busy()
    assert scene.wait_s() == pytest.approx(5.0, rel=0.03)


def test_those_that_wait_ahead_take_the_seats_first():
    scene = Scene()
    scene.busy()
    for _ in range(4):
        scene.enter(NORMAL, 1, 40)
    assert scene.wait_s() == pytest.approx(5.0 + 4 * 40 / 20, rel=0.03)


def test_a_call_of_several_choices_takes_several_seats():
    scene = Scene()
    scene.busy()
    scene.enter(NORMAL, 4, 4 * 40)
    assert scene.wait_s() == pytest.approx(5.0 + 4 * 40 / 20, rel=0.03)


def test_a_better_class_does_not_wait_for_a_worse_one():
    scene = Scene()
    scene.busy()
    for _ in range(4):
        scene.enter(NORMAL, 1, 40)
    assert scene.wait_s(BEST) == 0.0  # it takes a seat from one of them
    assert scene.wait_s(WORST) == pytest.approx(13.0, rel=0.03)


def test_it_does_wait_for_what_has_aged_past_it():
    scene = Scene()
    scene.enter(NORMAL, 1, 40)
    pair = scene.busy(num_tokens=601)
    scene.run(AGING_S - 5.0 - 0.5, *pair, tokens=100)
    assert scene.wait_s(BEST) == 0.0
    scene.run(1.0, *pair, tokens=4)
    assert scene.wait_s(BEST) > 5.0


def test_better_ones_that_keep_coming_take_their_share_but_not_for_ever():
    scene = Scene(num_seats=None)  # so that only the rate of starts is there to go by
    for _ in range(100):  # each second one of the best class comes and starts half a second later
        ticket = scene.enter(BEST, 1, 10)
        scene.clock.now += 0.5
        scene.forecast.produced(ticket, 10)
        scene.clock.now += 0.5
        scene.forecast.leave(ticket, "ended")
    for _ in range(9):
        scene.enter(NORMAL, 1, 10)
    # Ten starts at two per second, of which the best class takes one: 5 s / (1 - 1/2).
    assert scene.wait_s() == pytest.approx(10.0, rel=0.05)
    for _ in range(110):
        scene.enter(NORMAL, 1, 10)
    # 60 s, and the half of the first 30 s; not 60 / (1 - 1/2).
    assert scene.wait_s() == pytest.approx(60.0 + AGING_S / 2, rel=0.05)


def test_slow_starts_are_waited_for_though_seats_are_free():
    scene = Scene(num_seats=100)
    for _ in range(10):
        ticket = scene.enter(NORMAL, 1, 5)
        scene.clock.now += 2.0
        scene.forecast.produced(ticket, 5)
    for _ in range(4):
        scene.enter(NORMAL, 1, 5)
    assert scene.wait_s() == pytest.approx(5 * 2.0)


def test_tokens_that_were_allowed_and_not_needed_count_when_their_request_ends():
    scene = Scene()
    ticket = scene.running(num_tokens=1000)
    scene.run(1.0, ticket, tokens=10)
    scene.forecast.leave(ticket, "ended")
    scene.running()
    estimate = scene.forecast.estimate(NORMAL, 1000)
    assert estimate is not None
    assert estimate.run_s == pytest.approx(1.0, rel=0.05)


def test_a_request_that_its_client_left_proves_nothing():
    scene = Scene()
    ticket = scene.running(num_tokens=1000)
    scene.run(1.0, ticket, tokens=10)
    scene.forecast.leave(ticket, "left")
    scene.running()
    estimate = scene.forecast.estimate(NORMAL, 1000)
    assert estimate is not None
    assert estimate.run_s == pytest.approx(1000 / 12, rel=0.05)


def test_what_ends_at_its_time_limit_does_not_make_the_server_look_faster():
    scene = Scene()
    ticket = scene.running(num_tokens=1000)
    scene.run(1.0, ticket, tokens=10)
    scene.forecast.leave(ticket, "late")
    scene.running()
    estimate = scene.forecast.estimate(NORMAL, 1000)
    assert estimate is not None
    assert estimate.run_s > 80


def test_what_takes_longer_than_its_estimate_makes_later_ones_longer():
    scene = Scene()
    first, second = scene.busy()
    waiting = [scene.enter(NORMAL, 1, 10) for _ in range(30)]
    before = scene.forecast.estimate(NORMAL, 10)
    assert before is not None
    assert before.factor == UNPROVEN_FACTOR
    estimates = [t.estimate_s for t in waiting]
    assert estimates == sorted(estimates)  # type: ignore[type-var]
    for ticket in waiting[:25]:
        assert ticket.estimate_s is not None
        scene.clock.now = max(ticket.entered_s + 1.5 * ticket.estimate_s, scene.clock.now)
        scene.forecast.produced(first, 1)
        scene.forecast.leave(ticket, "ended")
    scene.clock.now += 1.0
    after = scene.forecast.estimate(NORMAL, 10)
    assert after is not None
    assert after.factor == pytest.approx(1.5, rel=0.01)
    other = scene.forecast.estimate(BEST, 10)
    assert other is not None
    assert other.factor == UNPROVEN_FACTOR
    scene.forecast.leave(second, "ended")


def test_a_factor_is_bounded_and_forgotten_after_half_a_minute():
    scene = Scene()
    pair = scene.busy(num_tokens=10_000)
    waiting = [scene.enter(WORST, 1, 10) for _ in range(30)]
    scene.clock.now += 4000.0
    for ticket in waiting:
        scene.forecast.leave(ticket, "ended")
    scene.clock.now += 1.0
    assert scene.forecast.estimate(WORST, 10).factor == MAX_FACTOR  # type: ignore[union-attr]
    scene.run(31.0, *pair, tokens=310)
    assert scene.forecast.estimate(WORST, 10).factor == UNPROVEN_FACTOR  # type: ignore[union-attr]


def test_with_nobody_in_the_house_nobody_is_told_to_wait():
    scene = Scene()
    for ticket in scene.busy():
        scene.forecast.leave(ticket, "ended")
    assert scene.forecast.estimate(NORMAL, 10**9) is None


def test_a_stall_is_forgotten_when_tokens_flow_again():
    scene = Scene()
    pair = scene.busy()
    scene.clock.now += 20.0
    scene.run(1.0, *pair, tokens=10)
    slow = scene.forecast.estimate(NORMAL, 100)
    scene.run(11.0, *pair, tokens=110)
    fast = scene.forecast.estimate(NORMAL, 100)
    assert slow is not None
    assert fast is not None
    assert slow.run_s > 30
    assert fast.run_s == pytest.approx(10.0, rel=0.05)
