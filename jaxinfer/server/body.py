"""Reading a request's body: up to a bound, and within a time."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from jaxinfer.server.state import Limits


class BodyTooLarge(Exception):
    """The body is longer than the bound (HTTP 413)."""

    def __init__(self, max_bytes: int):
        super().__init__(f"the body is larger than the {max_bytes} bytes that this server reads")


class BodyTimeout(Exception):
    """The body has not arrived in time (HTTP 408)."""

    def __init__(self, seconds: float):
        super().__init__(f"the body did not arrive within {seconds:g} s")


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes | None:
    """The whole body; None if the client went away before its end.

    Raises: BodyTooLarge, at the announced length already; BodyTimeout.
    """
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.max_body_bytes:
        raise BodyTooLarge(limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_s):
            return await _collect(receive, limits.max_body_bytes)
    except TimeoutError:
        raise BodyTimeout(limits.body_s) from None


async def _collect(receive: Receive, max_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
