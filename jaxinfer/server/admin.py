"""Routes under /admin/, for operators: an admin key opens them (middleware.Keys), and nothing else.

They change how the server runs, never what it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.server.body import read_body
from jaxinfer.server.logs import set_level
from jaxinfer.server.openapi import Operation
from jaxinfer.server.protocol import parse
from jaxinfer.server.replies import json_reply
from jaxinfer.server.state import ServerState

log = logging.getLogger(__name__)


class LogLevel(msgspec.Struct):
    """POST /admin/log-level, and its answer."""

    level: Literal["debug", "info", "warning", "error"]


class Flushed(msgspec.Struct):
    num_pages: int  # that were cached, and are free


ADMIN_OPERATIONS: Mapping[str, Operation] = {
    "/admin/log-level": Operation(LogLevel, LogLevel),
    "/admin/cache/flush": Operation(Flushed),
}


def admin_routes(state: ServerState) -> list[Route]:
    """All of them."""

    async def log_level(request: Request) -> Response:
        """What is logged from now on."""
        body = await read_body(request.scope, request.receive, state.limits) or b""
        wire, _ = parse(body, LogLevel)
        set_level(wire.level)
        log.warning("the log level is now %s", wire.level)
        return json_reply(wire)

    async def flush(request: Request) -> Response:
        """Forgets the prefix cache: pages that no running sequence owns."""
        return json_reply(Flushed(await state.flush_caches()))

    return [
        Route("/admin/log-level", log_level, methods=["POST"]),
        Route("/admin/cache/flush", flush, methods=["POST"]),
    ]
