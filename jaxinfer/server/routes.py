"""Every route but generation: models, health, metrics, tokenizer, version; and the errors of them
all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jaxinfer.errors import Forbidden, InvalidRequest, JaxInferError, Overloaded, Unavailable
from jaxinfer.server.admin import ADMIN_OPERATIONS, admin_routes
from jaxinfer.server.body import BodyTimeout, BodyTooLarge, read_body
from jaxinfer.server.dashboard_page import dashboard_routes
from jaxinfer.server.edge import IS_ADMIN, Edge
from jaxinfer.server.generation import ChatEndpoint, CompletionEndpoint
from jaxinfer.server.metrics import CONTENT_TYPE
from jaxinfer.server.middleware import open_paths_of
from jaxinfer.server.open_calls import owner_of
from jaxinfer.server.openapi import Operation, document
from jaxinfer.server.prompts import check_token_ids, encode_chat
from jaxinfer.server.protocol import (
    AbortRequest,
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from jaxinfer.server.replies import (
    Aborted,
    ChatChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
    Detokenized,
    ModelCard,
    ModelList,
    PhaseReply,
    Tokenized,
    VersionReply,
    error_body,
    error_reply,
    json_reply,
)
from jaxinfer.server.request_record import note_version
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.state import ServerState
from jaxinfer.server.tool_fields import check_tools
from jaxinfer.server.tool_use import check_template
from jaxinfer.server.version_wish import VersionWish
from jaxinfer.version import __version__

# Asked for by real clients; an answer that says so beats "unknown route".
ABSENT_FEATURES: Mapping[str, str] = {
    "/v1/embeddings": "embeddings",
    "/v1/responses": "the Responses API",
    "/v1/messages": "the Messages API",
    "/v1/rerank": "reranking",
    "/v1/audio/transcriptions": "audio",
    "/v1/images/generations": "images",
}


ForTokenizer = TypeVar("ForTokenizer", TokenizeRequest, DetokenizeRequest)


# What each route takes and gives, for openapi.py; its path and methods are the route's own.
OPERATIONS: Mapping[str, Operation] = {
    "/health": Operation(PhaseReply),
    "/ready": Operation(PhaseReply),
    "/metrics": Operation(media_type="text/plain"),
    "/version": Operation(VersionReply),
    "/v1/models": Operation(ModelList),
    "/v1/models/{name:path}": Operation(ModelCard, statuses=(404,)),
    "/v1/chat/completions": Operation(
        Completion, ChatEndpoint.wire, choice=ChatChoice, event=ChatDelta, statuses=(403,)
    ),
    "/v1/completions": Operation(
        Completion,
        CompletionEndpoint.wire,
        choice=CompletionChoice,
        event=CompletionChoice,
        statuses=(403,),
    ),
    "/abort_request": Operation(Aborted, AbortRequest),
    "/tokenize": Operation(Tokenized, TokenizeRequest),
    "/detokenize": Operation(Detokenized, DetokenizeRequest),
    **ADMIN_OPERATIONS,
}


def routes(state: ServerState, edge: Edge) -> list[BaseRoute]:
    """All of them."""
    rest = _Routes(state)
    absent = [
        Route(path, _absent, methods=["GET", "POST"], name=feature)
        for path, feature in ABSENT_FEATURES.items()
    ]
    found: list[BaseRoute] = [
        Route("/health", rest.health),
        Route("/ready", rest.ready),
        Route("/metrics", rest.metrics),
        Route("/version", rest.version),
        Route("/v1/models", rest.models),
        Route("/v1/models/{name:path}", rest.model),
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(state), methods=["POST"]),
        Route("/abort_request", rest.abort_request, methods=["POST"]),
        Route("/tokenize", rest.tokenize, methods=["POST"]),
        Route("/detokenize", rest.detokenize, methods=["POST"]),
        *dashboard_routes(state),
        *admin_routes(state),
        *absent,
    ]
    open_paths = open_paths_of(edge) if state.api_keys else None
    described = json_reply(document(found, OPERATIONS, open_paths=open_paths))

    async def openapi(request: Request) -> Response:
        return described

    return [*found, Route("/openapi.json", openapi)]


class _Routes:
    def __init__(self, state: ServerState):
        self._state = state

    async def health(self, request: Request) -> Response:
        """Liveness: 200 while loading, serving and draining; 503 when only a restart helps."""
        ailment = self._state.ailment()
        if ailment is not None:
            return error_reply(Unavailable(ailment, retry_after_s=60.0, code="unhealthy"))
        return json_reply(PhaseReply(self._state.phase))

    async def ready(self, request: Request) -> Response:
        """Readiness: 200 only while requests are taken."""
        self._state.served()
        ailment = self._state.ailment()
        if ailment is not None:
            raise Unavailable(ailment, retry_after_s=60.0, code="unhealthy")
        refusal = self._state.refusal()
        if refusal is not None:
            return error_reply(refusal)
        return json_reply(PhaseReply("ready"))

    async def metrics(self, request: Request) -> Response:
        self._state.breaker.look(self._state.step_s)
        return Response(self._state.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return json_reply(VersionReply(__version__))

    async def models(self, request: Request) -> Response:
        served, models = self._state.served(), self._state.versions.all
        cards = [_card(served, name) for name in served.names]
        if len(models) > 1:
            cards += [_card(m, f"{name}@{m.version}") for m in models for name in m.names]
        return json_reply(ModelList(cards))

    async def model(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        wish = VersionWish.read(Headers(), name, self._state.served().names)
        served = wish.choose(self._state.versions)
        served.check_name(wish.name)
        return json_reply(_card(served, name))

    async def abort_request(self, request: Request) -> Response:
        """Ends calls of the same key, in any phase; needs no room, and works while draining.

        With an admin key those of every key.
        An id that is not known, another key's included, counts 0: it may have ended just now.
        """
        state = self._state
        body = await read_body(request.scope, request.receive, state.limits) or b""
        wire, _ = parse(body, AbortRequest)
        is_admin = request.scope.get("state", {}).get(IS_ADMIN, False)
        owner = None if is_admin else owner_of(request.scope)
        return json_reply(Aborted(state.calls.abort(wire.request_id, owner)))

    async def tokenize(self, request: Request) -> Response:
        return await self._tokenizer_reply(request, TokenizeRequest, _tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._tokenizer_reply(request, DetokenizeRequest, _detokenized)

    async def _tokenizer_reply(
        self,
        request: Request,
        kind: type[ForTokenizer],
        make: Callable[[ServedModel, ForTokenizer], msgspec.Struct],
    ) -> Response:
        """The reply that `make` gives; made and encoded on a thread of the pool."""
        stable = self._state.served()
        versions = self._state.versions
        with self._state.admission.acquire():
            body = await read_body(request.scope, request.receive, self._state.limits) or b""
            with versions.call(stable):
                wire, _ = await stable.for_body(body, lambda: parse(body, kind))
            wish = VersionWish.read(request.headers, wire.model, stable.names)
            served = wish.choose(versions)
            served.check_name(wish.name)
            note_version(served.version)
            with versions.call(served):
                return await served.off_loop(lambda: json_reply(make(served, wire)))


def exception_handlers(
    state: ServerState,
) -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    """Exceptions -> answers in OpenAI's error shape."""

    async def refused(request: Request, error: JaxInferError) -> Response:
        reason = _reject_reason(error)
        if reason is not None:
            state.metrics.on_reject(reason)
        return error_reply(error)

    async def too_large(request: Request, error: BodyTooLarge) -> Response:
        state.metrics.on_reject("too_large")
        body = error_body(413, str(error), code="body_too_large")
        return json_reply(body, 413, {"connection": "close"})

    async def too_slow(request: Request, error: BodyTimeout) -> Response:
        state.metrics.on_reject("too_slow")
        body = error_body(408, str(error), code="body_timeout")
        return json_reply(body, 408, {"connection": "close"})

    async def by_status(request: Request, error: HTTPException) -> Response:
        message = {
            404: f"unknown route: {request.method} {request.url.path[:200]}",
            405: f"{request.url.path[:200]} does not take {request.method}",
        }.get(error.status_code, error.detail)
        body = error_body(error.status_code, message)
        return json_reply(body, error.status_code, error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        body = error_body(500, "an unexpected error; see the server's log", code="internal_error")
        return json_reply(body, 500, {"x-should-retry": "false"})

    return {
        JaxInferError: refused,
        BodyTooLarge: too_large,
        BodyTimeout: too_slow,
        HTTPException: by_status,
        Exception: unexpected,
    }


async def _absent(request: Request) -> Response:
    feature = ABSENT_FEATURES[request.scope["path"].removeprefix(request.scope["root_path"])]
    message = (
        f"this server does not offer {feature}; it has /v1/chat/completions and /v1/completions"
    )
    return json_reply(error_body(404, message, code="not_supported"), 404)


def _card(served: ServedModel, name: str) -> ModelCard:
    return ModelCard(name, served.created, served.root, served.max_model_len)


def _tokenized(served: ServedModel, wire: TokenizeRequest) -> Tokenized:
    ids = _tokenize(served, wire)
    reply = Tokenized(len(ids), served.max_model_len, ids)
    if wire.return_token_strs:
        reply.token_strs = [served.tokenizer.token_text(i) for i in ids]
    return reply


def _tokenize(served: ServedModel, wire: TokenizeRequest) -> list[int]:
    if (wire.prompt is None) == (wire.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if wire.prompt is not None:
        return served.tokenizer.encode(wire.prompt, add_special_tokens=wire.add_special_tokens)
    chat = ChatRequest(
        messages=wire.messages or [],
        add_generation_prompt=wire.add_generation_prompt and not wire.continue_final_message,
        continue_final_message=wire.continue_final_message,
        chat_template_kwargs=wire.chat_template_kwargs,
        tools=wire.tools,
    )
    if wire.tools:
        check_tools(wire.tools, None)
        check_template(served)
    return encode_chat(served, chat)


def _detokenized(served: ServedModel, wire: DetokenizeRequest) -> Detokenized:
    ids = check_token_ids(wire.tokens, served.tokenizer.vocab_size, "tokens")
    return Detokenized(served.tokenizer.decode(ids, skip_special_tokens=False))


def _reject_reason(error: JaxInferError) -> str | None:
    if isinstance(error, Overloaded):
        return error.code if error.code in ("deadline", "queue_timeout") else "overloaded"
    if isinstance(error, Forbidden):
        return "unauthorized"
    if isinstance(error, InvalidRequest):
        return "invalid"
    if isinstance(error, Unavailable):
        return error.code if error.code in ("draining", "loading", "breaker_open") else None
    return None
