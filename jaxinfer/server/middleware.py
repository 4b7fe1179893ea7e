"""Around every route: the request id, headers of safety, and who may pass.

Pure ASGI, so that streams pass through unbuffered.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.dashboard_page import KEYLESS_PATHS
from jaxinfer.server.edge import IS_ADMIN, KEY_DIGEST, Edge
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.replies import error_body, json_reply
from jaxinfer.server.request_record import CURRENT, RequestRecord, trace_id_of
from jaxinfer.server.served_versions import VERSION_HEADER

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = ("/health", "/ready")
ADMIN = "/admin/"
REFUSAL = "refusal"
"""In scope["state"]: a Refusal."""

# A reply may bring its own of the second kind: a page its policy, a stream its caching.
_ALWAYS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
_UNLESS_SET = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


class RequestIds:
    """x-request-id on every answer: the client's own if short and printable, else a new one. Makes
    the request's record, and adds the headers that every answer has, and x-jaxinfer-version where a
    version of the weights was chosen.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        theirs = given.get("x-request-id", "")
        request_id = theirs if _GOOD_ID.fullmatch(theirs) else uuid.uuid4().hex
        record = RequestRecord(request_id, trace_id_of(given.get("traceparent", "")))
        CURRENT.set(record)
        header = (b"x-request-id", request_id.encode("ascii"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                own: list[tuple[bytes, bytes]] = message.get("headers", [])
                names = {name for name, _ in own}
                more = [pair for pair in _UNLESS_SET if pair[0] not in names]
                if record.version is not None:
                    more.append((VERSION_HEADER.encode("ascii"), record.version.encode("latin-1")))
                message = {**message, "headers": [*own, header, *_ALWAYS, *more]}
            await send(message)

        await self._app(scope, receive, send_with_id)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is answered without being looked at."""

    status: int
    message: str


class Refusals:
    """Answers what connection.py has refused, and has the connection closed."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: Refusal | None = scope.get("state", {}).get(REFUSAL)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        headers = {"connection": "close"}
        if refusal.status == 503:
            self._metrics.on_reject("overloaded")
            headers["retry-after"] = "1"
        else:
            self._metrics.on_reject("invalid" if refusal.status == 400 else "too_large")
        reply = json_reply(error_body(refusal.status, refusal.message), refusal.status, headers)
        await reply(scope, receive, send)


class Hosts:
    """421 where the Host header names none of `hosts`, but for OPEN_PATHS: probes ask by address.

    Without it, a page whose name is made to resolve to this machine counts as of our own origin.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str], metrics: Metrics):
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "").lower())
        if host in self._hosts or path_of(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        self._metrics.on_reject("invalid")
        body = error_body(421, "this server is not asked by that Host name", code="unknown_host")
        await json_reply(body, 421)(scope, receive, send)


class Keys:
    """Who may pass where.

    /health, /ready       everybody; /metrics too, if it is open
    /admin/...            an admin key; 404 if there is none
    everything else       an API key or an admin key; everybody if there are no API keys
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], edge: Edge, metrics: Metrics):
        self._app = app
        self._digests = _digests(keys)
        self._admin_digests = _digests(edge.admin_keys)
        self._open_paths = open_paths_of(edge)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._metrics.on_reject("unauthorized")
        status, message, code = refusal
        headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        reply = json_reply(error_body(status, message, code=code), status, headers)
        await reply(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, message and code; None: it may pass."""
        path = path_of(scope)
        if path in self._open_paths:
            return None
        needs_admin = path.startswith(ADMIN)
        if needs_admin and not self._admin_digests:
            return 404, "this server was started without --admin-key", "no_admin_key"
        if not needs_admin and not self._digests:
            return None
        digest = _digest_of(scope)
        is_admin, is_user = _is_among(digest, self._admin_digests), _is_among(digest, self._digests)
        if is_admin or (is_user and not needs_admin):
            scope.setdefault("state", {}).update({KEY_DIGEST: digest.hex(), IS_ADMIN: is_admin})
            return None
        if is_user:
            return 403, "this key opens no admin route; send an admin key", "admin_key_needed"
        kind = "admin" if needs_admin else "API"
        message = f"a valid {kind} key is needed: send 'Authorization: Bearer KEY'"
        return 401, message, "invalid_api_key"


def open_paths_of(edge: Edge) -> tuple[str, ...]:
    """Paths that need no key."""
    found = (*OPEN_PATHS, *KEYLESS_PATHS)
    return (*found, "/metrics") if edge.open_metrics else found


def path_of(scope: Scope) -> str:
    """The path as the routes spell it."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _digest_of(scope: Scope) -> bytes:
    """Of the bearer's key; b"" without one."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return _digest(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else b""


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(digest, one) for one in known]  # all, always
    return any(matches)


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [_digest(key.encode()) for key in keys]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
