"""How many requests may be in the house at once, and when to come back when it is full.

Pure: the clock is an argument. Everything here happens on one event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from jaxinfer.errors import InvalidRequest, Overloaded

RATE_WINDOW_S = 30.0
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Admission:
    """A count of requests that are queued or running, with an upper bound.

    Args:
        max_requests: queued and running together.
        clock: seconds.
    """

    def __init__(self, max_requests: int, *, clock: Callable[[], float] = time.monotonic):
        self.max_requests = max_requests
        self.num_open = 0
        self._clock = clock
        self._start_s: float | None = None  # of the first admission: no rate before it
        self._released: deque[float] = deque()
        self._refused: deque[float] = deque()

    def acquire(self) -> Permit:
        """Room for one request, until the permit is released.

        Raises: Overloaded with the time to come back.
        """
        self.take(1)
        return Permit(self)

    def take(self, count: int) -> None:
        """For Permit. Raises: Overloaded, and nothing is taken."""
        if self.num_open + count > self.max_requests:
            raise self._refusal(count)
        if self._start_s is None:
            self._start_s = self._clock()
        self.num_open += count

    def give_back(self, count: int) -> None:
        """For Permit."""
        self.num_open -= count
        self._released.extend([self._clock()] * count)

    def retry_after_s(self, count: int = 1) -> float:
        """Until `count` more fit, if all who were refused lately come back before.

        From the rate at which requests ended in the last 30 s; in [1, 60].
        """
        now = self._clock()
        for times in (self._released, self._refused):
            while times and times[0] < now - RATE_WINDOW_S:
                times.popleft()
        elapsed = min(now - (now if self._start_s is None else self._start_s), RATE_WINDOW_S)
        rate = max(len(self._released), 1) / max(elapsed, 1e-3)
        seconds = (len(self._refused) + count) / rate
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)

    def _refusal(self, count: int) -> Overloaded:
        seconds = self.retry_after_s(count)
        self._refused.append(self._clock())
        return Overloaded(
            f"{self.num_open} requests are queued or running, of at most {self.max_requests}; "
            f"try again in {seconds:.0f} s",
            retry_after_s=seconds,
        )


class Permit:
    """Room for some requests of one caller; a context manager. Releasing it again does nothing."""

    def __init__(self, admission: Admission):
        self._admission = admission
        self._count = 1

    def grow(self, count: int, *, param: str) -> None:
        """Room for `count` requests in all, once it is known how many the call holds.

        Args:
            param: the request field that asks for so many.
        Raises: Overloaded, and the permit stays as it is; InvalidRequest when `count` can never
            fit.
        """
        most = self._admission.max_requests
        if count > most:
            raise InvalidRequest(
                f"the call asks for {count} choices (prompts times n); at most {most} fit; "
                "split it",
                param=param,
            )
        self._admission.take(count - self._count)
        self._count = count

    def release(self) -> None:
        count, self._count = self._count, 0
        if count:
            self._admission.give_back(count)

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
