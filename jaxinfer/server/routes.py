"""Every route but generation: models, health, metrics, tokenizer, version; and the errors of them
all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jaxinfer.errors import InvalidRequest, JaxInferError, Overloaded, Unavailable
from jaxinfer.server.body import BodyTimeout, BodyTooLarge, read_body
from jaxinfer.server.generation import ChatEndpoint, CompletionEndpoint
from jaxinfer.server.metrics import CONTENT_TYPE
from jaxinfer.server.prompts import check_token_ids, encode_chat
from jaxinfer.server.protocol import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from jaxinfer.server.replies import ModelCard, error_body, error_reply, json_reply
from jaxinfer.server.state import ServedModel, ServerState
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


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


def routes(state: ServerState) -> list[BaseRoute]:
    """All of them."""
    rest = _Routes(state)
    absent = [
        Route(path, _absent, methods=["GET", "POST"], name=feature)
        for path, feature in ABSENT_FEATURES.items()
    ]
    return [
        Route("/health", rest.health),
        Route("/ready", rest.ready),
        Route("/metrics", rest.metrics),
        Route("/version", rest.version),
        Route("/v1/models", rest.models),
        Route("/v1/models/{name:path}", rest.model),
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(state), methods=["POST"]),
        Route("/tokenize", rest.tokenize, methods=["POST"]),
        Route("/detokenize", rest.detokenize, methods=["POST"]),
        *absent,
    ]


class _Routes:
    def __init__(self, state: ServerState):
        self._state = state

    async def health(self, request: Request) -> Response:
        """Liveness: 200 while loading, serving and draining; 503 when only a restart helps."""
        ailment = self._state.ailment()
        if ailment is not None:
            return error_reply(Unavailable(ailment, retry_after_s=60.0, code="unhealthy"))
        return json_reply({"status": self._state.phase})

    async def ready(self, request: Request) -> Response:
        """Readiness: 200 only while requests are taken."""
        self._state.served()
        ailment = self._state.ailment()
        if ailment is not None:
            raise Unavailable(ailment, retry_after_s=60.0, code="unhealthy")
        refusal = self._state.refusal()
        if refusal is not None:
            return error_reply(refusal)
        return json_reply({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        self._state.breaker.look(self._state.step_s)
        return Response(self._state.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return json_reply({"version": __version__})

    async def models(self, request: Request) -> Response:
        served = self._state.served()
        return json_reply(ModelList([_card(served, name) for name in served.names]))

    async def model(self, request: Request) -> Response:
        served = self._state.served()
        return json_reply(_card(served, served.check_name(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        return await self._tokenizer_reply(request, TokenizeRequest, _tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._tokenizer_reply(request, DetokenizeRequest, _detokenized)

    async def _tokenizer_reply(
        self,
        request: Request,
        kind: type[ForTokenizer],
        make: Callable[[ServedModel, ForTokenizer], dict[str, Any]],
    ) -> Response:
        """The reply that `make` gives; made and encoded on a thread of the pool."""
        served = self._state.served()
        with self._state.admission.acquire():
            body = await read_body(request.scope, request.receive, self._state.limits) or b""
            wire, _ = await served.for_body(body, lambda: parse(body, kind))
            served.check_name(wire.model)
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


def _tokenized(served: ServedModel, wire: TokenizeRequest) -> dict[str, Any]:
    ids = _tokenize(served, wire)
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": served.max_model_len,
        "tokens": ids,
    }
    if wire.return_token_strs:
        reply["token_strs"] = [served.tokenizer.token_text(i) for i in ids]
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
    )
    return encode_chat(served, chat)


def _detokenized(served: ServedModel, wire: DetokenizeRequest) -> dict[str, Any]:
    ids = check_token_ids(wire.tokens, served.tokenizer.vocab_size, "tokens")
    return {"prompt": served.tokenizer.decode(ids, skip_special_tokens=False)}


def _reject_reason(error: JaxInferError) -> str | None:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, InvalidRequest):
        return "invalid"
    if isinstance(error, Unavailable):
        return error.code if error.code in ("draining", "loading", "breaker_open") else None
    return None
