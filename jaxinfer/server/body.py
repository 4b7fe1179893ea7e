"""Reading a request's body, up to a bound."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Receive, Scope


class BodyTooLarge(Exception):
    """The body is longer than the bound (HTTP 413)."""

    def __init__(self, max_bytes: int):
        super().__init__(f"the body is larger than the {max_bytes} bytes that this server reads")


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
    """The whole body; None if the client went away before its end.

    Raises: BodyTooLarge, at the announced length already.
    """
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLarge(max_bytes)
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
