"""When an arriving request would get its first token and be finished, if it were let in now.

Pure: the clock is an argument; everything here happens on one event loop. No engine: what is known
is who is in the house, in which class, with how many tokens still to produce, and what happened in
the last 10 s, to ended requests in the last 30 s.

Waiting is the larger of two estimates, because either may be what a request waits for:
- *seats*: the first of the running ones to end, then the tokens of those that wait ahead at the
  speed of all seats together. It follows tokens, not ends, so it is right from the first tokens
  on, also when a whole batch began at once and nothing ends for a while.
- *starts*: those that wait ahead at the rate at which first tokens came while somebody waited.
  This covers what the seats do not show: long prompts, and a KV pool that is full before the seats.
Ahead are all of the same or a better class, and what has aged past us; worse ones give up their
seats, as the scheduler has it. Better ones that are still to come do so at their recent rate, for
as long as ageing lets them past.

Running takes a request's tokens at the recent speed of a seat. Tokens that were allowed and not
needed count as produced when their request ends, so it is a speed of *allowed* tokens: where
requests ask for 1,000 and end after 100, estimates are ten times shorter by themselves.

Feedback. Both are means, while a deadline must hold for 99 of 100. So each estimate is kept until
its request ends; what 995 of 1,000 of its class needed lately, in units of their estimates, is what
later ones are multiplied by. At least 1.1, for those in good time until a better class came in
force; at most 3; 1.25 where fewer than 20 have ended.

What keeps it from being pessimistic for ever, when it refuses those from whom it would learn:
- With nobody in the house everybody is let in, whatever was measured.
- At a free seat the factor is 1.1: a time limit near the service time leaves no room for a queue,
  but the seats stay busy.
- Whoever is in the house renews the speed with every token. What is older than the 10 and 30 s is
  forgotten.

What it does not do:
- Be fair among lengths. Under overload the queue is as long as the short requests' time allows, so
  long ones with the same limit find no room; give them a class with a longer limit.
- Know how long an answer gets. Where lengths are random and the limit is near the mean, some are
  late whoever is let in.
- Judge before the first tokens: what a burst brings to a server that has measured nothing gets in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxinfer.scheduling.rank import AGING_S
from jaxinfer.server.service_rate import RATE_WINDOW_S, RecentSum

SPEED_WINDOW_S = 10.0  # of tokens and starts; ends are fewer, and looked at for RATE_WINDOW_S
SHARE_IN_TIME = 0.995
MIN_FACTOR, MAX_FACTOR = 1.1, 3.0
UNPROVEN_FACTOR = 1.25
MIN_PROOFS, MAX_PROOFS = 20, 512  # ended requests with an estimate
MIN_TOKENS, MIN_STARTS = 8, 4  # below that nothing was measured
MAX_LAG_S = 0.25  # of what is not worth being brought up to date at every token and arrival
MIN_ESTIMATE_S = 0.05  # a shorter one proves nothing by its ratio


Leaving = Literal["ended", "late", "left"]  # by itself; at its time limit; by anything else


@dataclass(slots=True, eq=False)
class Ticket:
    """An admitted call, as far as its time goes."""

    priority: int
    num_seats: int  # choices
    tokens_left: int  # that it may still produce, all choices together
    entered_s: float
    estimate_s: float | None  # from entering to the end; None: nothing was known or asked
    has_started: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now."""

    wait_s: float  # to the first token
    run_s: float  # from there to the end
    factor: float  # what 995 of 1,000 stay under is so much longer

    @property
    def end_s(self) -> float:
        return (self.wait_s + self.run_s) * self.factor


class Forecast:
    """Of one server.

    Args:
        num_seats: sequences that can run together; None: not known.
        clock: seconds.
    """

    def __init__(self, num_seats: int | None, *, clock: Callable[[], float]):
        self.num_seats = num_seats
        self._clock = clock
        self._waiting: dict[int, dict[Ticket, None]] = {}  # by priority, oldest first
        self._started: dict[Ticket, None] = {}
        self._num_started: dict[int, int] = {}  # seats, by priority
        self._last_s = clock()
        self._seat_s: dict[int, RecentSum] = {}  # seats that were taken x seconds, by priority
        self._tokens = RecentSum(SPEED_WINDOW_S)
        self._waiting_s = RecentSum(SPEED_WINDOW_S)  # seconds in which somebody waited
        self._starts = RecentSum(SPEED_WINDOW_S)  # seats
        self._entered: dict[int, RecentSum] = {}  # seats, by priority
        self._last_speed: float | None = None  # tokens per second of a seat
        self._proofs: dict[int, deque[tuple[float, float]]] = {}  # by priority: when, ratio
        self._factors: dict[int, tuple[float, float]] = {}  # by priority: when, factor
        self._born_s: float | None = None  # when the first one entered

    def enter(
        self, priority: int, num_seats: int, num_tokens: int, estimate: Estimate | None
    ) -> Ticket:
        """A call that was let in, and waits. Args: estimate: by which it was; None: by none."""
        self._pass_time()
        mean_s = None if estimate is None else estimate.wait_s + estimate.run_s
        now = self._clock()
        ticket = Ticket(priority, num_seats, num_tokens, now, mean_s)
        self._waiting.setdefault(priority, {})[ticket] = None
        self._entered.setdefault(priority, RecentSum(SPEED_WINDOW_S)).add(now, num_seats)
        self._born_s = now if self._born_s is None else self._born_s
        return ticket

    def produced(self, ticket: Ticket, num_tokens: int) -> None:
        """It has got so many tokens; with the first, it has started."""
        now = self._clock()
        if not ticket.has_started or now - self._last_s > MAX_LAG_S:
            self._pass_time()
        if not ticket.has_started:
            ticket.has_started = True
            del self._waiting[ticket.priority][ticket]
            self._started[ticket] = None
            self._count_seats(ticket, 1)
            self._starts.add(now, ticket.num_seats)
        ticket.tokens_left = max(ticket.tokens_left - num_tokens, 0)
        self._tokens.add(now, num_tokens)

    def leave(self, ticket: Ticket, how: Leaving) -> None:
        """`left` proves nothing, and `late` not that its other tokens would have come."""
        self._pass_time()
        now = self._clock()
        if ticket.has_started:
            del self._started[ticket]
            self._count_seats(ticket, -1)
            if how == "ended":
                self._tokens.add(now, ticket.tokens_left)
        else:
            del self._waiting[ticket.priority][ticket]
        if how != "left" and ticket.estimate_s is not None:
            ratio = (now - ticket.entered_s) / max(ticket.estimate_s, MIN_ESTIMATE_S)
            proofs = self._proofs.setdefault(ticket.priority, deque(maxlen=MAX_PROOFS))
            proofs.append((now, ratio))

    def num_waiting(self, priority: int) -> int:
        """Calls of this class that have got no token yet."""
        return len(self._waiting.get(priority, ()))

    def estimate(self, priority: int, num_tokens: float) -> Estimate | None:
        """Of a request of this class that may produce `num_tokens`.

        None: with nobody in the house or nothing measured, there is no reason to refuse anybody.
        """
        speed = self._speed()
        if speed is None or not (self._started or any(self._waiting.values())):
            return None
        ahead = [t for waiting in self._waiting.values() for t in self._before(priority, waiting)]
        num_ahead = sum(t.num_seats for t in ahead)
        start_rate = self._start_rate()
        wait_s = self._until_seated(priority, ahead, num_ahead, speed)
        is_seated = not (num_ahead or wait_s)
        factor = MIN_FACTOR if is_seated else self._factor(priority)
        run_s = num_tokens / speed
        if start_rate is None:
            return Estimate(wait_s, run_s, factor)
        wait_s = max(wait_s, (num_ahead + 1) / start_rate)
        shares = self._shares(priority, start_rate)
        end_s = wait_s + run_s
        end_s = min(end_s * self._crowding(priority, num_ahead, shares), _overtaken(end_s, shares))
        if not is_seated:
            wait_s = _overtaken(wait_s, shares)
        return Estimate(wait_s, max(end_s - wait_s, run_s), factor)

    def _before(self, priority: int, tickets: Iterable[Ticket]) -> Iterator[Ticket]:
        """Those that do not give way to a request that arrives now."""
        now = self._clock()
        for ticket in tickets:
            head_start_s = (ticket.priority - priority) * AGING_S
            if head_start_s <= 0 or ticket.entered_s + head_start_s <= now:
                yield ticket

    def _until_seated(
        self, priority: int, ahead: Sequence[Ticket], num_ahead: int, speed: float
    ) -> float:
        seated = list(self._before(priority, self._started))
        num_taken = sum(t.num_seats for t in seated)
        if self.num_seats is None or num_taken + num_ahead < self.num_seats:
            return 0.0
        first_s = min((t.tokens_left / t.num_seats for t in seated), default=0.0) / speed
        num_over = num_taken + num_ahead - self.num_seats  # of those ahead, also unseated
        share = min(num_over / num_ahead, 1.0) if num_ahead else 0.0
        return first_s + share * sum(t.tokens_left for t in ahead) / (self.num_seats * speed)

    def _shares(self, priority: int, start_rate: float) -> list[tuple[float, float]]:
        """Of each better class: for how long it gets past us, and its share of the server.

        The larger one of its share of the seats and of the starts, whichever is what is short.
        """
        now = self._clock()
        born_s = now if self._born_s is None else self._born_s
        elapsed = min(max(now - born_s, 1.0), SPEED_WINDOW_S)
        shares: list[tuple[float, float]] = []
        for theirs, entered in self._entered.items():
            if theirs < priority:
                share = entered.total(now) / elapsed / start_rate
                if self.num_seats is not None and theirs in self._seat_s:
                    seat_s = self._seat_s[theirs].total(now)
                    share = max(share, seat_s / elapsed / self.num_seats)
                shares.append(((priority - theirs) * AGING_S, share))
        return sorted(shares)

    def _crowding(
        self, priority: int, num_ahead: int, shares: Sequence[tuple[float, float]]
    ) -> float:
        """How many of its class are there for each seat that better ones leave it; at least 1."""
        number = self._num_started.get(priority, 0) + num_ahead + 1
        left = (self.num_seats or math.inf) * (1.0 - sum(share for _, share in shares))
        return max(number / left, 1.0) if left > 0 else math.inf

    def _speed(self) -> float | None:
        """Allowed tokens per second of a taken seat; the last one known where nothing runs."""
        self._pass_time()
        now = self._clock()
        tokens = self._tokens.total(now)
        seat_s = sum(s.total(now) for s in self._seat_s.values())
        if tokens >= MIN_TOKENS and seat_s > 0:
            self._last_speed = tokens / seat_s
        return self._last_speed

    def _start_rate(self) -> float | None:
        """First tokens per second in which somebody waited."""
        now = self._clock()
        starts, waiting_s = self._starts.total(now), self._waiting_s.total(now)
        return starts / waiting_s if starts >= MIN_STARTS and waiting_s > 0 else None

    def _factor(self, priority: int) -> float:
        now = self._clock()
        made_s, factor = self._factors.get(priority, (-math.inf, 0.0))
        if now - made_s > MAX_LAG_S:  # sorting is the dearest part of an estimate
            factor = self._proven_factor(priority)
            self._factors[priority] = now, factor
        return factor

    def _proven_factor(self, priority: int) -> float:
        since_s = self._clock() - RATE_WINDOW_S
        proofs = self._proofs.get(priority, ())
        ratios = sorted(ratio for at, ratio in proofs if at >= since_s)
        if len(ratios) < MIN_PROOFS:
            return UNPROVEN_FACTOR
        ratio = ratios[math.ceil(SHARE_IN_TIME * len(ratios)) - 1]
        return min(max(ratio, MIN_FACTOR), MAX_FACTOR)

    def _count_seats(self, ticket: Ticket, sign: int) -> None:
        number = self._num_started.get(ticket.priority, 0)
        self._num_started[ticket.priority] = number + sign * ticket.num_seats

    def _pass_time(self) -> None:
        now = self._clock()
        passed_s, self._last_s = now - self._last_s, now
        if passed_s > 0:
            for priority, number in self._num_started.items():
                seat_s = self._seat_s.setdefault(priority, RecentSum(SPEED_WINDOW_S))
                seat_s.add(now, number * passed_s)
            if any(self._waiting.values()):
                self._waiting_s.add(now, passed_s)


def _overtaken(seconds: float, shares: Sequence[tuple[float, float]]) -> float:
    """`seconds` of service, and what better ones that are still to come take of it: T with

    T = seconds + sum over better classes of share * min(T, for how long they get past)
    """
    left, free = seconds, 1.0 - sum(share for _, share in shares)
    for until_s, share in shares:
        if free > 0 and left / free <= until_s:
            break
        left, free = left + share * until_s, free + share
    return left / free
