"""The loop that drives a model: schedule, dispatch, collect, update, detokenize.

Host only: no JAX. The device is behind the `Runner` protocol; time is an argument or an injected clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.errors import JaxInferError
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.stats import RequestStats, StepStats


class Runner(Protocol):
    """The device half as the engine sees it. Two calls, so that a step can be dispatched before the last is read."""

    def dispatch(self, batch: Batch) -> Any:
        """Starts a step; the answer is given to `collect`."""
        ...

    def collect(self, pending: Any) -> StepResult:
        """Waits for the step and fetches what it sampled. Raises EngineFailure."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token's log-probability, and the likeliest tokens where asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one choice of a request gained in a step."""

    request_id: str
    index: int  # the choice, 0..n-1
    text: str  # new text, already safe to show
    token_ids: tuple[int, ...]  # new tokens
    logprobs: tuple[TokenLogprob, ...]  # one per new token when asked for, else empty
    finish_reason: FinishReason | None = None  # set exactly once per choice
    stop: str | int | None = None  # the stop string or token that ended it
    stats: RequestStats | None = None  # with finish_reason
    error: JaxInferError | None = None  # with finish_reason error or timeout


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What one call of `Engine.step` did."""

    outputs: tuple[RequestOutput, ...]
    stats: StepStats | None  # None when nothing ran
