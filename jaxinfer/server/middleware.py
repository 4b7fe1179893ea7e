"""Around every route: the request id, and the key.

Pure ASGI, so that streams pass through unbuffered.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.dashboard_page import KEYLESS_PATHS
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.replies import error_body, json_reply

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = ("/health", "/ready")


class RequestIds:
    """x-request-id on every answer: the client's own if short and printable, else a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        theirs = Headers(scope=scope).get("x-request-id", "")
        request_id = theirs if _GOOD_ID.fullmatch(theirs) else uuid.uuid4().hex
        header = (b"x-request-id", request_id.encode("ascii"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """401 without one of the keys, but for OPEN_PATHS and the files of the dashboard. No keys:
    everything passes.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], metrics: Metrics):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._may_pass(scope):
            self._metrics.on_reject("unauthorized")
            body = error_body(
                401,
                "a valid API key is needed: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
            reply = json_reply(body, 401, {"www-authenticate": "Bearer"})
            await reply(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS or path in KEYLESS_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, always
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
