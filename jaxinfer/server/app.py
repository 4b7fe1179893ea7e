"""The ASGI application: routes, errors and what stands around them.

It owns no engine and no start-up; lifecycle.py moves the state that it is given.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp

from jaxinfer.server.middleware import ApiKeys, RequestIds
from jaxinfer.server.routes import exception_handlers, routes
from jaxinfer.server.state import ServerState


def create_app(state: ServerState) -> ASGIApp:
    """An app that answers from `state`, in every phase of it.

    Request ids stand outermost: a 500 has one too.
    """
    app = Starlette(routes=routes(state), exception_handlers=exception_handlers(state))
    return RequestIds(ApiKeys(app, keys=state.api_keys, metrics=state.metrics))
