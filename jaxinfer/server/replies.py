"""What goes over the wire, as msgspec structs in OpenAI's shapes.

No engine, no tokenizer: values come in ready. UNSET leaves a field out, None sends null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from jaxinfer.errors import JaxInferError, Overloaded, Unavailable
from jaxinfer.outputs import Truncation
from jaxinfer.server.protocol import status_of

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

WireFinish = Literal["stop", "length", "tool_calls", "abort"]


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, *, prompt: int, completion: int, cached: int) -> Usage:
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionCall(Struct):
    name: str
    arguments: str  # JSON


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class FunctionCallDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first of a call has its id, type and name."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct):
    content: str | None  # None: nothing but tool calls
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: WireFinish
    logprobs: ChatLogprobs | None = None
    truncation: Truncation | UnsetType = UNSET


class ChatDelta(Struct):
    index: int
    delta: Delta
    finish_reason: WireFinish | None = None
    logprobs: ChatLogprobs | None = None
    truncation: Truncation | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: WireFinish | None = None
    logprobs: CompletionLogprobs | None = None
    truncation: Truncation | UnsetType = UNSET


class Completion(Struct):
    """A whole answer or one chunk of it, of either kind; `object` tells which."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: list[Any]
    system_fingerprint: str  # the weights version
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "jaxinfer"
    parent: None = None


class Aborted(Struct):
    """POST /abort_request."""

    aborted: int  # calls


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class PhaseReply(Struct):
    status: str


class VersionReply(Struct):
    version: str


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    prompt: str


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(Struct):
    error: ErrorDetail


_TYPE_OF = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """OpenAI's error object."""
    return ErrorBody(ErrorDetail(message, _TYPE_OF.get(status, "server_error"), param, code))


def body_of(error: JaxInferError) -> ErrorBody:
    return error_body(status_of(error), error.message, param=error.param, code=error.code)


def json_reply(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`content` as JSON."""
    return Response(encode(content), status, dict(headers or {}), media_type="application/json")


def error_reply(error: JaxInferError) -> Response:
    """An error with its status and, where it tells one, the time to come back.

    openai-python retries every 5xx; for a failure that repeating does not mend we ask it not to.
    """
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | Unavailable):
        seconds = min(max(error.retry_after_s, 1.0), 60.0)
        headers["retry-after"] = str(math.ceil(seconds))
        headers["retry-after-ms"] = str(math.ceil(1000 * seconds))
    status = status_of(error)
    if status == 500:
        headers["x-should-retry"] = "false"
    return json_reply(body_of(error), status, headers)
