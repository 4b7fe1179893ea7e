"""/dashboard: a page that shows the metrics live and tries a chat, and the numbers behind it.

The page and its parts are files that are served as they are; they hold nothing of this server and
need no key. What they show is asked for with one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jaxinfer.server.replies import json_reply
from jaxinfer.server.state import ServerState
from jaxinfer.version import __version__

FOLDER = Path(__file__).with_name("dashboard")
PAGE = "index.html"
PARTS = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "series.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
GRAFANA = "grafana.json"
KEYLESS_PATHS = ("/dashboard", *(f"/dashboard/{name}" for name in PARTS))
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cache-control": "no-cache",
}


def dashboard_routes(
    state: ServerState, *, clock: Callable[[], float] = time.monotonic
) -> list[BaseRoute]:
    """Raises: OSError if a file of the page is missing in the installation."""
    start_s = clock()

    async def data(request: Request) -> Response:
        reply = dashboard_data(state, uptime_s=clock() - start_s)
        return json_reply(reply, headers={"cache-control": "no-store"})

    return [
        Route("/dashboard", _file(PAGE, "text/html; charset=utf-8")),
        *(Route(f"/dashboard/{name}", _file(name, kind)) for name, kind in PARTS.items()),
        Route(f"/dashboard/{GRAFANA}", _file(GRAFANA, "application/json")),
        Route("/dashboard/data", data),
    ]


def dashboard_data(state: ServerState, *, uptime_s: float) -> dict[str, Any]:
    """{server: what it is and how it does; metrics: see metrics_snapshot; versions: numbers of
    each version of the weights}.
    """
    model = state.model
    return {
        "server": {
            "uptime_s": uptime_s,
            "version": __version__,
            "phase": state.phase,
            "progress": state.progress,
            "ailment": state.ailment(),
            "models": list(model.names) if model is not None else [],
            "max_model_len": model.max_model_len if model is not None else None,
        },
        "metrics": state.metrics.snapshot(),
        "versions": state.metrics.by_version(),
    }


def _file(name: str, kind: str) -> Callable[[Request], Any]:
    content = (FOLDER / name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers={"content-type": kind, **HEADERS})

    return send
