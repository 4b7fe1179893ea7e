"""Where calls wait before they get a model: a pause that refuses nobody.

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio

from jaxinfer.errors import DeadlineExceeded, Overloaded, Unavailable
from jaxinfer.server.time_limits import NO_LIMITS, TimeLimits

BARRED_RETRY_S = 60.0
PAUSE_RETRY_S = 5.0


class Door:
    """Open at first. A call passes it before it chooses a model, and never waits behind it."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._pause: str | None = None
        self._fault: str | None = None

    @property
    def pause(self) -> str | None:
        """Why calls wait; None: they do not."""
        return self._pause

    @property
    def fault(self) -> str | None:
        """Why nobody passes any more; None: the door opens and shuts."""
        return self._fault

    async def go_through(self, left: TimeLimits = NO_LIMITS) -> None:
        """Waits while it is shut, as long as a call has.

        Raises: Unavailable when it will not open again; Overloaded, DeadlineExceeded when the time
            is over.
        """
        pause = self._pause
        seconds = left.within(TimeLimits(left.queue_timeout_s)).timeout_s
        try:
            async with asyncio.timeout(None if pause is None else seconds):
                await self._opening()
        except TimeoutError:
            if seconds == left.timeout_s:
                raise DeadlineExceeded(f"the time limit passed in a pause: {pause}") from None
            raise Overloaded(
                f"the time to wait passed in a pause: {pause}; try again later",
                retry_after_s=PAUSE_RETRY_S,
                code="queue_timeout",
            ) from None

    async def _opening(self) -> None:
        while True:
            if self._fault is not None:
                raise Unavailable(self._fault, retry_after_s=BARRED_RETRY_S)
            if self._pause is None:
                return
            await self._opened.wait()

    def shut(self, reason: str) -> None:
        """Whoever comes waits."""
        self._pause = reason
        self._opened.clear()

    def open(self) -> None:
        """Whoever waits goes on."""
        self._pause = None
        self._opened.set()

    def bar(self, reason: str) -> None:
        """Whoever waits or comes is refused, for ever: the process should be restarted."""
        self._fault = reason
        self.open()
