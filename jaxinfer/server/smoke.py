"""The first requests of a new version, before anybody's: does it say what it should?

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from jaxinfer.config import SamplingParams
from jaxinfer.errors import InvalidRequest, JaxInferError
from jaxinfer.scheduling.request import FinishReason, Request

if TYPE_CHECKING:
    from jaxinfer.server.served_model import ServedModel

PRIORITY = 1000  # behind everybody's
MAX_TOKENS = 256  # of a recorded text
MAX_RECORDED = 256
SMOKE_S = 600.0  # for all of them: they run behind everybody else
MAX_SHOWN = 80  # characters of a text in a reason
NUM_PLAIN_TOKENS = 8
PLAIN_PROMPTS = ("The", "1 + 1 =", "def add(a, b):")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a version must say to a prompt, or to a conversation."""

    prompt: str | tuple[Mapping[str, Any], ...]  # or the messages
    text: str
    max_tokens: int


class SmokeFailed(Exception):
    """The reason, in one line: what was expected, what was found."""


def read_recorded(lines: str) -> tuple[Recorded, ...]:
    """JSON lines: {"prompt": str, or "messages": [...], "text": str, "max_tokens": int}.

    Raises: InvalidRequest naming the line.
    """
    found = tuple(
        _recorded(line, number) for number, line in enumerate(lines.splitlines(), 1) if line.strip()
    )
    if len(found) > MAX_RECORDED:
        raise InvalidRequest(
            f"{len(found)} recorded outputs, but at most {MAX_RECORDED} are tried", param="recorded"
        )
    return found


def _recorded(line: str, number: int) -> Recorded:
    try:
        fields = json.loads(line)
        prompt = fields["prompt"] if "prompt" in fields else tuple(fields["messages"])
        text, max_tokens = fields["text"], fields["max_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise _bad_line(number, f"{type(error).__name__}: {error}") from None
    is_prompt = isinstance(prompt, str) or all(isinstance(m, dict) for m in prompt)
    if not is_prompt or not isinstance(text, str):
        raise _bad_line(number, "a field of another type")
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS:
        raise _bad_line(number, f"max_tokens {max_tokens!r}")
    return Recorded(prompt, text, max_tokens)


def _bad_line(number: int, found: str) -> InvalidRequest:
    return InvalidRequest(
        f"recorded outputs, line {number}: expected "
        '{"prompt": str or "messages": [...], "text": str, "max_tokens": 1 to '
        f"{MAX_TOKENS}}}, found {found}",
        param="recorded",
    )
