"""Wire fields and the model's own defaults -> SamplingParams.

Ranges are checked by SamplingParams itself; here is only what depends on the wire form or on the
vocabulary.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer.config import SamplingParams, Truncate
from jaxinfer.errors import InvalidRequest
from jaxinfer.server.guided import guided_field
from jaxinfer.server.protocol import ChatRequest, CompletionRequest, SamplingFields

log = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS = 16
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_COPIED = (
    *("min_tokens", "seed", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
)


def usable_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a Hugging Face generation_config stands in for absent fields; bad values are left
    out, with a warning.
    """
    defaults: dict[str, Any] = {}
    for name in _DEFAULTED:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            log.warning("generation_config: %s; ignored", error)
        else:
            defaults[name] = value
    return defaults


def chat_sampling(
    request: ChatRequest, defaults: Mapping[str, Any], vocab_size: int
) -> SamplingParams:
    """Raises: InvalidRequest naming the field as the client spelled it."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    limit = request.max_completion_tokens
    renamed = {"logprobs": "top_logprobs"}
    if limit is not None:
        if request.max_tokens is not None and request.max_tokens < 1:
            message = f"max_tokens must be an integer at least 1; got {request.max_tokens}"
            raise InvalidRequest(message, param="max_tokens")
        renamed["max_tokens"] = "max_completion_tokens"
    return _sampling(
        request,
        defaults,
        vocab_size,
        renamed,
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def completion_sampling(
    request: CompletionRequest, defaults: Mapping[str, Any], vocab_size: int
) -> SamplingParams:
    """Raises: InvalidRequest naming the field."""
    if request.echo and request.logprobs is not None:
        raise InvalidRequest(
            "echo excludes logprobs: this server makes no log-probabilities of prompts; send one "
            "of the two",
            param="echo",
        )
    limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.is_echo_only:
        limit = 1  # of which none is asked for
    return _sampling(request, defaults, vocab_size, {}, max_tokens=limit, logprobs=request.logprobs)


def capped_sampling(
    params: SamplingParams, *, server_cap: int | None, class_cap: int | None, truncate: Truncate
) -> SamplingParams:
    """`params` with the smaller of the two caps on output tokens, if there is one.

    A request that asks for no more than the cap is cut where it asks to be, by token.
    """
    caps = [cap for cap in (server_cap, class_cap) if cap is not None]
    if not caps:
        return params
    return dataclasses.replace(params, output_cap=min(caps), truncate=truncate)


def _sampling(
    fields: SamplingFields,
    defaults: Mapping[str, Any],
    vocab_size: int,
    renamed: Mapping[str, str],
    **given: Any,
) -> SamplingParams:
    _check_stream_options(fields)
    field = guided_field(fields)
    guided = None if field is None else field.guided
    values: dict[str, Any] = {**defaults, **given, "guided": guided}
    for name in (*_DEFAULTED, *_COPIED):
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    try:
        params = SamplingParams(**values)
    except InvalidRequest as error:
        field = error.param
        if field is None or field not in renamed:
            raise
        name = renamed[field]
        raise InvalidRequest(error.message.replace(field, name, 1), param=name) from None
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", (token for token, _ in params.bias_pairs), vocab_size)
    return params


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise InvalidRequest(
                f"{name} must be below the vocabulary's {vocab_size}; got {token}", param=name
            )


def _check_stream_options(fields: SamplingFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream=true", param="stream_options")
