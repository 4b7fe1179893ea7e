"""Who wants to know what the engine does: the facts that metrics are made of.

Host only: no JAX.
"""

from __future__ import annotations

from typing import Protocol

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.stats import PoolStats, RequestStats, StepStats


class Observer(Protocol):
    """Takes the facts.

    The first four are called on the engine thread, the others on the event loop.
    """

    def on_step(self, step: StepStats, pool: PoolStats) -> None: ...

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None: ...

    def on_retry(self, num_sequences: int) -> None:
        """A step failed; so many of its sequences begin again behind what they have."""
        ...

    def on_rebuild(self, duration_s: float) -> None:
        """The KV pool was lost and has been made anew."""
        ...

    def on_first_token(self, ttft_s: float, version: str) -> None:
        """`version`: of the weights; "" where the request named none."""
        ...

    def on_gap(self, gap_s: float, num_tokens: int, version: str) -> None:
        """`num_tokens` came `gap_s` after the last one of the same choice."""
        ...
