"""Server-sent events to one client, and noticing that a client has gone.

No engine and no OpenAI shapes: payloads come in as bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType

from starlette.types import Receive, Send

DONE = b"[DONE]"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream
]


class ClientGone(Exception):
    """The client has closed its connection, or takes nothing any more."""


class ReaderStalled(ClientGone):
    """The client is there, but takes nothing."""


class EventSender:
    """Writes events; all that is ready goes out in one write.

    Args:
        stall_s: how long a write may wait for a client that does not read. Meanwhile nobody reads
            its RequestStream, so this is also how long its requests may be paused.
    """

    def __init__(self, send: Send, *, stall_s: float):
        self._send = send
        self._stall_s = stall_s

    async def start(self) -> None:
        await self._write({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def events(self, payloads: Iterable[bytes]) -> None:
        """One `data:` event each. Raises: ClientGone."""
        body = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
        if body:
            await self._write({"type": "http.response.body", "body": body, "more_body": True})

    async def ping(self) -> None:
        """A comment, which clients skip: proxies and clients see that the stream lives."""
        await self._write({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})

    async def finish(self, payloads: Iterable[bytes] = ()) -> None:
        """The last events, then [DONE]."""
        await self.events([*payloads, DONE])
        await self._write({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ReaderStalled(f"the client has read nothing for {self._stall_s:g} s") from None
        except OSError as error:
            raise ClientGone(f"the connection is closed: {error}") from error


class Departure:
    """Watches, while it is entered, for the client to close its connection. The body must have been
    read before.

    Both kinds of answer need it: an answer that is not streamed writes nothing until its end.
    """

    def __init__(self, receive: Receive):
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self.has_happened = False
        self._task: asyncio.Task[None] | None = None

    def call(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the client goes; at once if it has gone."""
        self._callbacks.append(callback)
        if self.has_happened:
            callback()

    def check(self) -> None:
        """Raises: ClientGone if it has happened."""
        if self.has_happened:
            raise ClientGone("the client has closed the connection")

    def __enter__(self) -> Departure:
        self._task = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_happened = True
        for callback in self._callbacks:
            callback()
