"""What is told of a choice that ended badly.

Host only: no JAX.
"""

from __future__ import annotations

from jaxinfer.errors import DeadlineExceeded, EngineFailure, JaxInferError, Overloaded
from jaxinfer.scheduling.sequence import Sequence


def step_failure(error: Exception, hopeless: list[Sequence]) -> JaxInferError:
    """Of those that have no try left; all have had as many."""
    num_tries = 1 + max((sequence.num_retries for sequence in hopeless), default=0)
    failure = EngineFailure(f"a step failed, {num_tries} of {num_tries} tries: {words_of(error)}")
    failure.__cause__ = error
    return failure


def words_of(error: Exception) -> str:
    is_ours = isinstance(error, JaxInferError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


def too_late(sequence: Sequence, now: float) -> DeadlineExceeded:
    waited = now - sequence.request.arrival_s
    return DeadlineExceeded(
        f"the request ended at its deadline, after {waited:.1f} s and "
        f"{sequence.num_output_tokens} tokens; give it more time or ask for fewer tokens"
    )


def not_started(sequence: Sequence, now: float) -> Overloaded:
    waited = now - sequence.request.arrival_s
    return Overloaded(
        f"the request waited {waited:.1f} s for its turn, which is as long as it may; "
        "try again later, or let it wait longer",
        retry_after_s=min(max(waited, 1.0), 60.0),
        code="queue_timeout",
    )
