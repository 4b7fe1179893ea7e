"""One log line per request: ids, what was asked of which route, how it ended.

Never a path as it came, a query, a header, a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.request_record import CURRENT, Fact

log = logging.getLogger("jaxinfer.access")

PROBES = ("/health", "/ready", "/metrics")  # polled for ever: at DEBUG as long as they are well
NO_ROUTE = "-"
CLIENT_GONE = 499  # nothing was answered, because nobody was there any more


class AccessLog:
    """Pure ASGI. Stands inside RequestIds, which makes the record, and around everything else."""

    def __init__(self, app: ASGIApp, *, clock: Callable[[], float] = time.monotonic):
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = self._clock()
        status = CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            _write(scope, status, self._clock() - start_s)


def _write(scope: Scope, status: int, duration_s: float) -> None:
    route: str = getattr(scope.get("route"), "path", NO_ROUTE)
    level = logging.DEBUG if route in PROBES and status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    record = CURRENT.get()
    facts = {} if record is None else {name: _rounded(fact) for name, fact in record.facts.items()}
    fields = {
        "method": scope["method"],
        "route": route,
        "status": status,
        "duration_s": round(duration_s, 4),
        **facts,
    }
    words = "".join(f" {name}={value}" for name, value in facts.items())
    log.log(
        level,
        "%s %s %d %.3f s%s",
        *(scope["method"], route, status, duration_s, words),
        extra={"fields": fields},
    )


def _rounded(fact: Fact) -> Fact:
    return round(fact, 4) if isinstance(fact, float) else fact
