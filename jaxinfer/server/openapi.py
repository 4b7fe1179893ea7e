"""GET /openapi.json: what the routes and the wire types are, as an OpenAPI 3.1 document.

Made from them, so that it cannot name what is not there. The ranges are those of SamplingParams;
tests/server/test_openapi.py proves each against it, and that the server answers as it is written.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from jaxinfer.config import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from jaxinfer.server.middleware import ADMIN
from jaxinfer.server.protocol import MAX_MESSAGES
from jaxinfer.server.replies import ErrorBody
from jaxinfer.server.served_versions import VERSION_HEADER
from jaxinfer.version import __version__

Json = dict[str, Any]

_COMPONENT = "#/components/schemas/{name}"
_ALWAYS = (400, 414, 421, 431, 500, 503)  # what stands around every route, and an engine that ails
_WITH_BODY = (404, 408, 413, 429, 504)
_SAID_WITH = {429: "retry-after", 503: "retry-after"}

_TOKEN_ID: Json = {"minimum": 0}
_FIELDS_OF_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": _COMPONENT.format(name="TextPart")}},
                {"type": "null"},
            ]
        },
    },
    "required": ["role"],
}

# Field of a request -> JSON type -> what bounds it.
RANGES: Mapping[str, Mapping[str, Json]] = {
    "max_tokens": {"integer": {"minimum": 1}},
    "max_completion_tokens": {"integer": {"minimum": 1}},
    "min_tokens": {"integer": {"minimum": 0}},
    "temperature": {"number": {"minimum": 0, "maximum": 2}},
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "top_k": {"integer": {"minimum": -1}},
    "min_p": {"number": {"minimum": 0, "maximum": 1}},
    "presence_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "frequency_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "repetition_penalty": {"number": {"exclusiveMinimum": 0}},
    "seed": {"integer": {"minimum": -(2**63), "maximum": 2**63 - 1}},
    "n": {"integer": {"minimum": 1, "maximum": 16}},
    "logprobs": {"integer": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}},
    "top_logprobs": {"integer": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}},
    "stop": {
        "string": {"minLength": 1},
        "array": {"maxItems": MAX_STOP_STRINGS, "items": {"type": "string", "minLength": 1}},
    },
    "stop_token_ids": {"array": {"items": {"type": "integer", **_TOKEN_ID}}},
    "tokens": {"array": {"items": {"type": "integer", **_TOKEN_ID}}},
    "logit_bias": {
        "object": {
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    },
    "messages": {
        "array": {"minItems": 1, "maxItems": MAX_MESSAGES, "items": _FIELDS_OF_MESSAGE},
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route takes and gives."""

    reply: type[msgspec.Struct] | None = None  # of a 200; None: text, of `media_type`
    body: type[msgspec.Struct] | None = None
    media_type: str = "application/json"
    choice: type[msgspec.Struct] | None = None  # of the reply, whose own type leaves it open
    event: type[msgspec.Struct] | None = None  # of a reply that may be a stream: one choice of it
    statuses: tuple[int, ...] = ()  # beyond those that all have


def document(
    routes: Iterable[BaseRoute],
    operations: Mapping[str, Operation],
    *,
    open_paths: Collection[str] | None,
) -> Json:
    """The document of `routes`; of each, what `operations` says of its path.

    Args:
        open_paths: that need no key; None: none but those under /admin/ does.
    """
    known = [
        (route, operations[route.path])
        for route in routes
        if isinstance(route, Route) and route.path in operations
    ]
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": __version__},
        "paths": {},
        "components": {
            "schemas": _schemas([operation for _, operation in known]),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    for route, operation in known:
        path = re.sub(r":\w+}", "}", route.path)
        is_admin = path.startswith(ADMIN)
        is_locked = is_admin or (open_paths is not None and path not in open_paths)
        document["paths"][path] = {
            method.lower(): _operation(route, operation, path, is_locked=is_locked)
            for method in sorted(route.methods or ())
            if method != "HEAD"
        }
    return document


def _operation(route: Route, operation: Operation, path: str, *, is_locked: bool) -> Json:
    about = inspect.getdoc(route.endpoint) or route.name
    statuses = {*_ALWAYS, *operation.statuses, *(_WITH_BODY if operation.body else ())}
    if is_locked:
        statuses |= {401, 403, 404} if path.startswith(ADMIN) else {401}
    found: Json = {
        "summary": about.splitlines()[0],
        "operationId": re.sub(r"\W+", "_", path).strip("_"),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "security": [{"bearer": []}] if is_locked else [],
        "responses": {
            "200": _reply(operation),
            **{str(status): _error(status) for status in sorted(statuses)},
        },
    }
    if operation.body is not None:
        content = {"application/json": {"schema": _ref(operation.body.__name__)}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _reply(operation: Operation) -> Json:
    content: Json = {operation.media_type: {"schema": {"type": "string"}}}
    if operation.reply is not None:
        content = {"application/json": {"schema": _ref(_name(operation.reply, operation.choice))}}
    about = "as asked"
    if operation.event is not None:
        content["text/event-stream"] = {}  # 3.1 has no word for the form of events
        about += f"; a stream's events hold one {_name(operation.reply, operation.event)} each"
    headers = _headers(None if operation.event is None else VERSION_HEADER)
    return {"description": about, "headers": headers, "content": content}


def _error(status: int) -> Json:
    return {
        "description": "refused or failed: why",
        "headers": _headers(_SAID_WITH.get(status)),
        "content": {"application/json": {"schema": _ref(ErrorBody.__name__)}},
    }


def _headers(more: str | None = None) -> Json:
    names = ["x-request-id", *([more] if more else [])]
    return {name: {"required": True, "schema": {"type": "string"}} for name in names}


def _schemas(operations: Sequence[Operation]) -> Json:
    types = [
        struct
        for operation in operations
        for struct in (operation.reply, operation.body, operation.choice, operation.event)
        if struct is not None
    ]
    _, found = msgspec.json.schema_components([*types, ErrorBody], ref_template=_COMPONENT)
    for operation in operations:
        for choice in (operation.choice, operation.event):
            if choice is not None:
                _close(found, operation.reply, choice)
        if operation.body is not None:
            _bound(found[operation.body.__name__]["properties"])
    found["TextPart"] = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return found


def _close(found: Json, reply: type[msgspec.Struct] | None, choice: type[msgspec.Struct]) -> None:
    """Adds the reply with that kind of choice."""
    assert reply is not None, "who has choices has a reply"
    open_one: Json = found[reply.__name__]
    choices = {"type": "array", "items": _ref(choice.__name__)}
    properties = {**open_one["properties"], "choices": choices}
    name = _name(reply, choice)
    found[name] = {**open_one, "title": name, "properties": properties}


def _bound(fields: Json) -> None:
    for name, by_type in RANGES.items():
        schema = fields.get(name, {})
        for branch in schema.get("anyOf", [schema]):
            branch.update(by_type.get(branch.get("type"), {}))


def _name(reply: type[msgspec.Struct] | None, choice: type[msgspec.Struct] | None) -> str:
    assert reply is not None, "text has no name"
    return reply.__name__ if choice is None else f"{reply.__name__}Of{choice.__name__}"


def _ref(name: str) -> Json:
    return {"$ref": _COMPONENT.format(name=name)}
