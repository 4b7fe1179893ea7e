"""What the user sent, once it has been parsed, tokenized and checked.

Host only: no JAX.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxinfer.config import SamplingParams
from jaxinfer.constraint import Constraint


class FinishReason(enum.StrEnum):
    """Why a sequence ended. HTTP shows `stop` and `length`; the others become errors."""

    STOP = "stop"  # an end token, a stop token, a stop string, or the end of the grammar
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client went away or asked for it
    TIMEOUT = "timeout"  # its deadline passed
    ERROR = "error"  # a step failed, or its logits were not numbers


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it; `sampling.n` choices share the prompt."""

    request_id: str
    token_ids: tuple[int, ...]  # the prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0  # of the engine's clock
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # of the engine's clock: ended with `timeout` after it
    queue_deadline_s: float | None = None  # the same, if it has not started by then
    cache_salt: str = ""  # prefix pages are shared only within one salt
    constraint: Constraint | None = None  # of sampling.guided, at the beginning of an answer
    version: str | None = None  # of the weights, to the end of all choices; None: the current one
    is_shadow: bool = False  # a comparison's, not a user's: no metrics of requests count it
