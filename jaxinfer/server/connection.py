"""One HTTP/1.1 connection, bounded before there is a request: its head, its time, its company.

uvicorn's httptools protocol reads heads of any length for as long as they take. (Its h11 protocol
bounds their bytes, but costs more per request; ARCHITECTURE.) What is too much is left as a Refusal
in the request's state, for the app to answer with its ids and headers; what has no request gets a
bare answer here.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxinfer.server.middleware import OPEN_PATHS, REFUSAL, Refusal
from jaxinfer.server.replies import encode, error_body
from jaxinfer.server.state import Limits

SPARE_CONNECTIONS = 64  # beyond the bound, that are still told so; further ones are closed unheard
MAX_PIPELINED = 16  # requests that wait for the one before them
_PROBES = tuple(path.encode("ascii") for path in OPEN_PATHS)


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """For uvicorn.Config(http=...)."""
    return cast("type[asyncio.Protocol]", partial(Connection, limits=limits))


class Connection(HttpToolsProtocol):
    """A connection that gives up on slow and endless heads.

    connected, or first bytes of another request        -> header_s for a whole head
    head too long, too many connections, no Host        -> Refusal, then closed
    head that does not end, trailers, chunk extensions  -> 431 at max_header_bytes
    idle between requests                               -> uvicorn's keep-alive timeout
    """

    def __init__(self, *, limits: Limits, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._has_head = False
        self._num_header_bytes = 0
        self._num_loose_bytes = 0  # since a head was whole, or a piece of a body came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections + SPARE_CONNECTIONS:
            transport.abort()
            return
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests:
            self._start_deadline()
        self._num_loose_bytes += len(data)
        super().data_received(data)
        if self._num_loose_bytes > self._limits.max_header_bytes + self._limits.max_target_bytes:
            self._end(431, f"headers are longer than {self._limits.max_header_bytes} bytes")

    def send_400_response(self, msg: str) -> None:
        self._end(400, "this is not a valid HTTP/1.1 request")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_head = False
        self._num_header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:  # a trailer: nobody reads it
            return
        self._num_header_bytes += len(name) + len(value)
        if len(self.headers) <= self._limits.max_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._num_loose_bytes = 0
        self._stop_deadline()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            return
        refusal = self._refusal()
        if refusal is not None:
            self.scope["state"][REFUSAL] = refusal  # type: ignore[typeddict-item]
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_loose_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_loose_bytes = 0
        super().on_body(body)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refusal(self) -> Refusal | None:
        limits = self._limits
        if len(self.url) > limits.max_target_bytes:
            return Refusal(414, f"the path is longer than {limits.max_target_bytes} bytes")
        if self._num_header_bytes > limits.max_header_bytes:
            return Refusal(431, f"headers are longer than {limits.max_header_bytes} bytes")
        if len(self.headers) > limits.max_headers:
            return Refusal(431, f"there are more than {limits.max_headers} headers")
        assert self.parser is not None, "it has called"
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            return Refusal(400, f"expected one Host header; got {hosts}")
        if len(self.connections) > limits.max_connections and self.url not in _PROBES:
            return Refusal(503, f"more than {limits.max_connections} connections are open")
        return None

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.header_s, self._give_up)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self._num_loose_bytes:
            self._end(408, f"no whole request arrived within {self._limits.header_s:g} s")
        elif not self.transport.is_closing():
            self.transport.close()

    def _end(self, status: int, message: str) -> None:
        """Closes, with a bare answer unless another one is under way."""
        if self.transport.is_closing():
            return
        if self._is_between_requests:
            self.transport.write(_bare(status, message))
        self.transport.close()


def _bare(status: int, message: str) -> bytes:
    body = encode(error_body(status, message))
    lines = (
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
    )
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n" + body
