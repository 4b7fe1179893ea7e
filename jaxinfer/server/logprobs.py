"""Log-probabilities of output tokens in OpenAI's two shapes.

Pure: tokens are spelled by the tokenizer that is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from jaxinfer.server.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)

if TYPE_CHECKING:
    from jaxinfer.outputs import TokenLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say (vLLM's choice)


class Speller(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(tokens: Iterable[TokenLogprob], speller: Speller) -> ChatLogprobs:
    """choices[].logprobs of chat: every token with its bytes and the likeliest ones."""
    content: list[ChatTokenLogprob] = []
    for token in tokens:
        raw = speller.token_bytes(token.token_id)
        top = [_top(token_id, value, speller) for token_id, value in token.top]
        content.append(ChatTokenLogprob(_text(raw), finite(token.logprob), list(raw), top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokens: Iterable[TokenLogprob], speller: Speller, *, offset: int
) -> CompletionLogprobs:
    """choices[].logprobs of plain completions.

    Args:
        offset: characters of this choice's earlier tokens.
    """
    shape = CompletionLogprobs([], [], [], [])
    for token in tokens:
        text = _text(speller.token_bytes(token.token_id))
        shape.tokens.append(text)
        shape.token_logprobs.append(finite(token.logprob))
        top = {_text(speller.token_bytes(i)): finite(value) for i, value in token.top}
        shape.top_logprobs.append({text: finite(token.logprob), **top})
        shape.text_offset.append(offset)
        offset += len(text)
    return shape


def finite(value: float) -> float:
    """Not below LOWEST; LOWEST also for what is no number."""
    return LOWEST if math.isnan(value) else max(value, LOWEST)


def _top(token_id: int, value: float, speller: Speller) -> TopLogprob:
    raw = speller.token_bytes(token_id)
    return TopLogprob(_text(raw), finite(value), list(raw))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
