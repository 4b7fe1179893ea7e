"""What has ended lately, and so when it is worth coming back.

Pure: the clock is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

RATE_WINDOW_S = 30.0
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
_SLOTS_PER_S = 4


class RecentSum:
    """The sum of what was added in the last `window_s` seconds, to a quarter of a second."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._slots: deque[tuple[int, float]] = deque()  # number of the slot, its sum
        self._total = 0.0

    def add(self, now_s: float, value: float) -> None:
        self._total += value
        number = int(now_s * _SLOTS_PER_S)
        if self._slots and self._slots[-1][0] == number:
            value += self._slots.pop()[1]
        self._slots.append((number, value))

    def total(self, now_s: float) -> float:
        oldest = int((now_s - self._window_s) * _SLOTS_PER_S)
        while self._slots and self._slots[0][0] < oldest:
            self._total -= self._slots.popleft()[1]
        if not self._slots:
            self._total = 0.0  # what rounding has left
        return self._total


class ServiceRate:
    """Requests and tokens that ended in the last 30 s, and requests that were refused.

    Tokens end when they have been produced; those that a request was let in with and did not need
    end with it.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._start_s: float | None = None  # of the first admission: no rate before it
        self._ended = RecentSum()
        self._tokens = RecentSum()
        self._refused: dict[int, RecentSum] = {}  # by the priority of the class

    def on_admitted(self) -> None:
        if self._start_s is None:
            self._start_s = self._clock()

    def on_ended(self, count: int) -> None:
        self._ended.add(self._clock(), count)

    def on_tokens(self, count: int) -> None:
        self._tokens.add(self._clock(), count)

    def on_refused(self, priority: int) -> None:
        self._refused.setdefault(priority, RecentSum()).add(self._clock(), 1)

    def retry_after_s(
        self, count: int, tokens: int, priority: int, at_least_s: float = 0.0
    ) -> float:
        """Until `count` more requests fit, and `tokens` have ended; in [1, 60].

        As if all who were refused lately, of this class and better ones, came back before.
        """
        now = self._clock()
        elapsed = 0.0 if self._start_s is None else min(now - self._start_s, RATE_WINDOW_S)
        elapsed = max(elapsed, 1e-3)
        before = sum(r.total(now) for p, r in self._refused.items() if p <= priority)
        seconds = (before + count) * elapsed / max(self._ended.total(now), 1.0)
        seconds = max(seconds, tokens * elapsed / max(self._tokens.total(now), 1.0))
        return min(max(seconds, at_least_s, MIN_RETRY_S), MAX_RETRY_S)
