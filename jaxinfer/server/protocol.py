"""The OpenAI surface as wire types: a body is parsed once, strictly, and every 4xx about its form
leaves here.

No JAX, no engine. Unknown fields are accepted; the caller gets their names, to log them once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec

from jaxinfer.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailure,
    Forbidden,
    InvalidRequest,
    JaxInferError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from jaxinfer.server.tool_fields import Tool, ToolChoice
from jaxinfer.server.unsupported import check_supported

# The first class in the error's own order of bases that has an entry.
STATUS_OF: Mapping[type[JaxInferError], int] = {
    ModelNotFound: 404,
    Forbidden: 403,
    Conflict: 409,
    InvalidRequest: 400,
    Overloaded: 429,
    Unavailable: 503,
    DeadlineExceeded: 504,
    EngineFailure: 500,
    JaxInferError: 500,
}

# Sent by clients, without meaning here.
ACCEPTED_FIELDS = frozenset(
    (
        *("metadata", "store", "service_tier", "reasoning_effort", "verbosity"),
        *("request_id", "safety_identifier", "prompt_cache_retention"),
    )
)


MAX_JSON_PARTS = 500_000
"""Commas and opening brackets of a body, in strings too. Decoding holds the interpreter lock, and
every stream and probe stands still meanwhile: for 16 MiB of "[]," 0.8 s, for so many parts 0.04."""
MAX_JSON_DEPTH = 100
MAX_MESSAGES = 10_000  # of a chat; the template walks through them in Python
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and plain completions share. None: the field's default."""

    not_here: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # fields of others: neutral values

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None  # at most one of these (server/guided.py)
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | str | None = None  # of a class
    timeout: float | None = None  # seconds from arrival to the last token
    cache_salt: str | None = None
    user: str | int | None = None  # calls of one stay on one version of the weights
    prompt_cache_key: str | int | None = None  # the same, where there is no user


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call

    not_here = {"echo": (None, False)}


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    not_here = {
        "tools": (None, []),
        "tool_choice": (None, "none"),
        "parallel_tool_calls": (None, True, False),
    }

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None  # the prompt before the text
    add_special_tokens: bool | None = None

    @property
    def is_echo_only(self) -> bool:
        """Nothing is to be generated."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt.

        Raises: InvalidRequest for an empty one, or a list that mixes kinds.
        """
        if isinstance(self.prompt, str):
            return [_checked(self.prompt)]
        if not self.prompt:
            raise InvalidRequest("prompt is an empty list; send at least one", param="prompt")
        kinds = set(map(type, self.prompt))
        if len(kinds) > 1:
            raise InvalidRequest(
                "prompt must be a string, a list of strings, a list of token ids or a list of "
                "such lists; the list that came mixes them",
                param="prompt",
            )
        if kinds == {int}:
            return [cast("list[int]", self.prompt)]
        return [_checked(p) for p in self.prompt]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort_request: a reply's id, or the x-request-id that came with the call."""

    request_id: str


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


Wire = TypeVar("Wire", bound=msgspec.Struct)


def parse(body: bytes, wire: type[Wire]) -> tuple[Wire, frozenset[str]]:
    """The body as `wire`, and the names of fields that we do not know.

    Raises: InvalidRequest for malformed JSON, a wrong type, or a field whose feature does not exist
        here.
    """
    fields = _json_object(body)
    known = frozenset(wire.__struct_fields__)
    named = check_supported(fields, getattr(wire, "not_here", {}))
    try:
        parsed = msgspec.convert(fields, wire)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong_type(str(error)) from None
    return parsed, frozenset(fields) - known - named - ACCEPTED_FIELDS


def status_of(error: JaxInferError) -> int:
    """The HTTP status of an error."""
    return next(STATUS_OF[c] for c in type(error).__mro__ if c in STATUS_OF)


def _json_object(body: bytes) -> dict[str, Any]:
    """Of a name that comes twice the last value counts, as in most parsers."""
    parts = sum(map(body.count, (b",", b"[", b"{")))
    if parts > MAX_JSON_PARTS:
        raise InvalidRequest(
            f"the body holds {parts} commas and opening brackets; at most {MAX_JSON_PARTS} are "
            "read; split it"
        )
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body's JSON is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {type(fields).__name__}")
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH:
        _check_depth(fields)
    return fields


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise InvalidRequest(f"the body's JSON is nested more than {MAX_JSON_DEPTH} levels deep")


def _wrong_type(message: str) -> InvalidRequest:
    """msgspec says: "Expected `int`, got `str` - at `$.max_tokens`"."""
    at = re.search(r"\$\.([A-Za-z_]+)", message)
    missing = re.search(r"missing required field `(\w+)`", message)
    found = at or missing
    return InvalidRequest(message.replace("$.", ""), param=found.group(1) if found else None)


def _checked(prompt: Any) -> str | list[int]:
    if not prompt:
        raise InvalidRequest("prompt is empty; send at least one token", param="prompt")
    return prompt
