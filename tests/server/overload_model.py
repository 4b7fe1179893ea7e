"""A little server with seats, in simulated time: who gets through the admission, and who in time.

Every step gives each running request one token. Its length grows with the running ones and with
those that begin in it, as on a real device. Requests start in the scheduler's order, and take seats
from those of lower classes, which go on later with what they have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxinfer.errors import Overloaded
from jaxinfer.scheduling.rank import AGING_S
from jaxinfer.server.admission import Admission, Permit
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.time_limits import TimeLimits
from tests.fakes import FakeClock


@dataclass
class Visitor:
    """One request."""

    arrival_s: float
    name: str  # of its class
    max_tokens: int  # that it asks for
    num_tokens: int  # after which it ends
    timeout_s: float
    permit: Permit | None = None
    retry_after_s: float | None = None  # of its refusal
    first_s: float | None = None
    end_s: float | None = None
    is_late: bool = False
    got: int = 0


@dataclass
class Model:
    """Args: all seconds; a step takes fixed + running * per_seat + beginning * per_start."""

    num_seats: int = 8
    fixed_s: float = 0.03
    per_seat_s: float = 0.001
    per_start_s: float = 0.004
    max_requests: int = 256
    classes: PriorityClasses = field(default_factory=PriorityClasses)

    def __post_init__(self) -> None:
        self.clock = FakeClock(1000.0)
        self.admission = Admission(
            self.max_requests, classes=self.classes, num_seats=self.num_seats, clock=self.clock
        )

    def capacity(self, num_tokens: float) -> float:
        """Requests per second with all seats taken."""
        step_s = self.fixed_s + self.num_seats * self.per_seat_s
        return self.num_seats / (num_tokens * step_s + self.num_seats * self.per_start_s)

    def run(self, visitors: Sequence[Visitor]) -> None:
        """Serves them all; `arrival_s` counts from now."""
        start_s = self.clock.now
        coming = sorted(visitors, key=lambda v: v.arrival_s)
        waiting, running = list[Visitor](), list[Visitor]()
        place = 0
        while place < len(coming) or waiting or running:
            if not (waiting or running):
                self.clock.now = max(self.clock.now, start_s + coming[place].arrival_s)
            now = self.clock.now
            while place < len(coming) and start_s + coming[place].arrival_s <= now:
                self.clock.now = start_s + coming[place].arrival_s
                if self._enter(coming[place]):
                    waiting.append(coming[place])
                place += 1
            self.clock.now = now
            self._expire(start_s, waiting, running)
            num_new = self._seat(waiting, running)
            if running:
                self._step(start_s, running, num_new)

    def _seat(self, waiting: list[Visitor], running: list[Visitor]) -> int:
        """Returns: how many begin."""
        waiting.sort(key=self._rank)
        num_new = 0
        while waiting:
            first = waiting[0]
            if len(running) == self.num_seats:
                worst = max(running, key=self._rank)
                is_lower = self._priority(worst) > self._priority(first)
                if not is_lower or self._rank(worst) <= self._rank(first):
                    break
                running.remove(worst)
                waiting.append(worst)
            running.append(waiting.pop(0))
            num_new += 1
        return num_new

    def _rank(self, visitor: Visitor) -> float:
        return visitor.arrival_s + self._priority(visitor) * AGING_S

    def _priority(self, visitor: Visitor) -> int:
        return self.classes.find(visitor.name, "class").priority

    def _enter(self, visitor: Visitor) -> bool:
        asked = self.classes.find(visitor.name, "class")
        limits = TimeLimits(visitor.timeout_s)
        try:
            permit = self.admission.acquire(asked, limits=limits)
        except Overloaded as error:
            visitor.retry_after_s = error.retry_after_s
            return False
        try:
            permit.settle(asked, 1, param="n", num_tokens=visitor.max_tokens, limits=limits)
        except Overloaded as error:
            visitor.retry_after_s = error.retry_after_s
            permit.release("refused")
            return False
        permit.charge(10)
        visitor.permit = permit
        return True

    def _step(self, start_s: float, running: list[Visitor], num_new: int) -> None:
        self.clock.now += self.fixed_s + len(running) * self.per_seat_s + num_new * self.per_start_s
        for visitor in list(running):
            assert visitor.permit is not None
            visitor.got += 1
            visitor.permit.produced(1)
            visitor.first_s = visitor.first_s or self.clock.now - start_s
            if visitor.got >= visitor.num_tokens:
                running.remove(visitor)
                self._end(start_s, visitor)

    def _expire(self, start_s: float, *queues: list[Visitor]) -> None:
        for queue in queues:
            for visitor in list(queue):
                if self.clock.now - start_s > visitor.arrival_s + visitor.timeout_s:
                    queue.remove(visitor)
                    visitor.is_late = True
                    self._end(start_s, visitor)

    def _end(self, start_s: float, visitor: Visitor) -> None:
        assert visitor.permit is not None
        visitor.end_s = self.clock.now - start_s
        visitor.is_late |= visitor.end_s > visitor.arrival_s + visitor.timeout_s
        visitor.permit.release("late" if visitor.got < visitor.num_tokens else "ended")


def crowd(
    rate: float,
    seconds: float,
    seed: int,
    *,
    timeout_s: float,
    tokens: Callable[[random.Random], tuple[int, int]] = lambda _: (32, 32),
    name: Callable[[random.Random], str] = lambda _: "normal",
    first_s: float = 0.0,
) -> list[Visitor]:
    """Random arrivals, `rate` per second. Args: tokens: (asked for, needed)."""
    chance = random.Random(seed)
    visitors: list[Visitor] = []
    at = first_s + chance.expovariate(rate)
    while at < first_s + seconds:
        most, needed = tokens(chance)
        visitors.append(Visitor(at, name(chance), most, needed, timeout_s))
        at += chance.expovariate(rate)
    return visitors


@dataclass(frozen=True)
class Outcome:
    num_admitted: int
    num_late: int  # of the admitted
    goodput: float  # requests per second that ended in time, where the load was on


def outcome(visitors: Sequence[Visitor], since_s: float, until_s: float) -> Outcome:
    """Of arrivals and ends between two moments."""
    admitted = [v for v in visitors if v.permit is not None and since_s <= v.arrival_s < until_s]
    good = [v for v in visitors if v.end_s and not v.is_late and since_s <= v.end_s < until_s]
    return Outcome(len(admitted), sum(v.is_late for v in admitted), len(good) / (until_s - since_s))
