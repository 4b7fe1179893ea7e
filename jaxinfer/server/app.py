"""The ASGI application: routes, errors and what stands around them.

It owns no engine and no start-up; lifecycle.py moves the state that it is given.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxinfer.server.access_log import AccessLog
from jaxinfer.server.edge import Edge
from jaxinfer.server.middleware import Hosts, Keys, Refusals, RequestIds
from jaxinfer.server.routes import exception_handlers, routes
from jaxinfer.server.served_versions import VERSION_HEADER
from jaxinfer.server.state import ServerState

SEEN_BY_PAGES = ("x-request-id", VERSION_HEADER, "retry-after", "x-should-retry")
CORS_MAX_AGE_S = 600


def create_app(state: ServerState, edge: Edge | None = None) -> ASGIApp:
    """An app that answers from `state`, in every phase of it.

    Request ids stand outermost: a 500 has one too. CORS stands before the keys: a preflight carries
    none, and a page may read why it got a 401.
    """
    edge = edge or Edge()
    app: ASGIApp = Starlette(
        routes=routes(state, edge), exception_handlers=exception_handlers(state)
    )
    app = Keys(app, keys=state.api_keys, edge=edge, metrics=state.metrics)
    if edge.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=edge.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=SEEN_BY_PAGES,
            max_age=CORS_MAX_AGE_S,
        )
    if edge.allowed_hosts:
        app = Hosts(app, hosts=edge.allowed_hosts, metrics=state.metrics)
    app = Refusals(app, metrics=state.metrics)
    return RequestIds(AccessLog(app) if edge.log_requests else app)
