"""Whether new requests are let in while steps fail or hang.

Pure: the clock is an argument. Everything here happens on one event loop. Requests that run are not
its business: they go on, and what becomes of their steps is what it learns from.

    closed --- `threshold` steps in a row failed, or one is beyond its deadline ---> open
    open --- `open_s` have passed, and no step is beyond its deadline ---> half-open
    half-open --- a step was read ---> closed;  --- a step failed ---> open
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from jaxinfer.errors import Unavailable

log = logging.getLogger(__name__)

PROBE_RETRY_S = 1.0  # told to those who come while another request tries how things are


class BreakerState(enum.IntEnum):
    """The value is that of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """Learns from `note_step` and `look`; asked by `let_in`.

    Args:
        threshold: failed steps in a row that open it.
        step_timeout_s: a step that takes longer opens it, before it has ended.
        open_s: how long it stays open before one request may try again.
        on_change: told each new state.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        threshold: int,
        step_timeout_s: float,
        open_s: float,
        on_change: Callable[[BreakerState], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._threshold = threshold
        self._step_timeout_s = step_timeout_s
        self._open_s = open_s
        self._on_change = on_change
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._num_failed = 0  # in a row
        self._opened_s = 0.0
        self._probe: object | None = None  # the new one of this half-open time

    @property
    def state(self) -> BreakerState:
        """As of the last call of anything else."""
        return self._state

    def note_step(self, is_good: bool) -> None:
        """A step was read, or has failed."""
        self._pass_time()
        self._num_failed = 0 if is_good else self._num_failed + 1
        if is_good:
            if self._state is BreakerState.HALF_OPEN:
                self._become(BreakerState.CLOSED, "a step was read")
        elif self._state is BreakerState.HALF_OPEN:
            self._open("a step failed")
        elif self._num_failed >= self._threshold and self._state is BreakerState.CLOSED:
            self._open(f"{self._num_failed} steps in a row failed")

    def look(self, step_s: float) -> BreakerState:
        """The state now, when the step under way has taken `step_s` seconds so far."""
        if step_s > self._step_timeout_s:
            self._open(f"a step takes longer than {self._step_timeout_s:g} s")
        self._pass_time()
        return self._state

    @contextmanager
    def let_in(self, step_s: float) -> Generator[None]:
        """Around a new request. Half-open, it is the only new one until it has ended.

        Args:
            step_s: as of `look`.
        Raises: Unavailable with the time to come back.
        """
        state = self.look(step_s)
        if state is BreakerState.OPEN:
            raise self._refusal(self._opened_s + self._open_s - self._clock())
        is_probe = state is BreakerState.HALF_OPEN
        if is_probe and self._probe is not None:
            raise self._refusal(PROBE_RETRY_S)
        me = object()
        if is_probe:
            self._probe = me
        try:
            yield
        finally:
            if self._probe is me:
                self._probe = None

    def refusal(self) -> Unavailable | None:
        """Why nobody is let in; None: somebody is."""
        if self._state is not BreakerState.OPEN:
            return None
        return self._refusal(self._opened_s + self._open_s - self._clock())

    def _refusal(self, seconds: float) -> Unavailable:
        return Unavailable(
            "steps of the engine fail; no new requests are taken until one has worked again",
            retry_after_s=max(seconds, PROBE_RETRY_S),
            code="breaker_open",
        )

    def _open(self, reason: str) -> None:
        """Or stays open for as long from now on."""
        self._opened_s = self._clock()
        self._become(BreakerState.OPEN, reason)

    def _pass_time(self) -> None:
        is_over = self._clock() - self._opened_s >= self._open_s
        if self._state is BreakerState.OPEN and is_over:
            self._become(BreakerState.HALF_OPEN, f"{self._open_s:g} s have passed")

    def _become(self, state: BreakerState, reason: str) -> None:
        if state is self._state:
            return
        log.warning("circuit breaker: %s -> %s (%s)", _name(self._state), _name(state), reason)
        self._state = state
        self._probe = None  # the last one may go on for long, and proves nothing any more
        self._on_change(state)


def _name(state: BreakerState) -> str:
    return state.name.lower().replace("_", "-")
