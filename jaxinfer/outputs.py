"""What the engine hands out: new text and tokens of a choice, and how a step went.

Host only: no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.errors import JaxInferError
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.stats import RequestStats, StepStats
from jaxinfer.text_cap import CutAt


@dataclass(frozen=True, slots=True)
class Truncation:
    """An answer that SamplingParams.output_cap ended."""

    max_output_tokens: int  # the cap
    at: CutAt  # what its text ends with


@dataclass(slots=True)
class TokenLogprob:
    """One output token's log-probability, and the likeliest tokens where asked for. Read only."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(slots=True)
class RequestOutput:
    """What one choice of a request gained in a step.

    Read only, though not frozen: one is made per row and step, and a frozen one takes a
    microsecond longer.
    """

    request_id: str
    index: int  # the choice, 0..n-1
    text: str  # new text, already safe to show
    token_ids: tuple[int, ...]  # new tokens; an end token counts, though its text is not shown
    logprobs: tuple[TokenLogprob, ...]  # one per new token when asked for, else empty
    finish_reason: FinishReason | None = None  # set exactly once per choice
    stop: str | int | None = None  # the stop string, or the token of stop_token_ids, that ended it
    stats: RequestStats | None = None  # with finish_reason
    error: JaxInferError | None = None  # with finish_reason error or timeout
    truncation: Truncation | None = None  # with finish_reason length, if output_cap ended it


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What one call of `Engine.step` did."""

    outputs: tuple[RequestOutput, ...]
    stats: StepStats | None  # None when nothing ran, or what ran failed
    failed_versions: tuple[str, ...] = ()
    # of each step that failed with somebody in it, and of all who may have cost the pool
    num_retried: int = 0  # sequences that begin again for it
    rebuild_s: float | None = None  # the engine was made anew, which took so long
