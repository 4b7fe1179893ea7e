"""A call's client, and what stays the same whichever version answers it.

No engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from jaxinfer.server.admission import Permit
from jaxinfer.server.call_head import CallHead
from jaxinfer.server.door import Door
from jaxinfer.server.sse import Departure
from jaxinfer.server.time_limits import TimeLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Of one call, whose body has come."""

    body: bytes
    head: CallHead
    arrival_s: float
    clock: Callable[[], float]
    scope: Scope
    receive: Receive
    send: Send
    permit: Permit

    def left(self, limits: TimeLimits) -> TimeLimits:
        """What is left now of limits that count from arrival."""
        return limits.after(self.clock() - self.arrival_s)

    async def passes(self, door: Door, left: TimeLimits) -> bool:
        """Waits while the door is shut. Returns: False if the client left meanwhile.

        Raises: as Door.go_through.
        """
        if door.pause is None:
            await door.go_through()
            return True
        waiting = asyncio.ensure_future(door.go_through(left))

        def leave() -> None:
            waiting.cancel()

        try:
            with Departure(self.receive) as departure:
                departure.call(leave)
                await asyncio.wait({waiting})
                if departure.has_happened:
                    log.info("499 %s: the client left in a pause", self.scope["path"])
                    return False
            waiting.result()
        finally:
            waiting.cancel()
        return True
