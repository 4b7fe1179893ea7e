"""Plain facts that the core emits; only the metrics of jaxinfer/server know Prometheus.

No imports of ours. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step, when it has been read."""

    kind: Literal["prefill", "decode"]
    num_seqs: int  # real rows, without padding
    num_tokens: int  # tokens computed, without padding
    num_padded_tokens: int  # tokens computed, with padding: the bucket
    num_sampled: int  # tokens that came out
    duration_s: float  # since it was dispatched or, if that is later, the step before was read
    version: str = ""  # of the weights


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a step went."""

    version: str  # of the weights
    stats: StepStats | None  # None: it failed

    @property
    def is_good(self) -> bool:
        return self.stats is not None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The KV pool and the queues at one moment."""

    num_running: int
    num_waiting: int
    pages_total: int
    pages_used: int  # owned by sequences
    pages_cached: int  # free, with content that a prefix hit can use
    pages_free: int  # free, without
    num_preemptions: int  # since start
    prefix_query_tokens: int  # since start: prompt tokens looked up
    prefix_hit_tokens: int  # since start: of these found
    num_paused: int = 0  # wait for their readers; neither running nor waiting

    @classmethod
    def total(cls, pools: Iterable[PoolStats]) -> PoolStats:
        """Those of several engines as one's. There must be one."""
        return cls(*map(sum, zip(*map(astuple, pools), strict=True)))


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request, when it has ended."""

    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, taken from the prefix cache at first scheduling
    num_output_tokens: int
    num_preemptions: int
    arrival_s: float
    first_scheduled_s: float | None  # None: never scheduled
    first_token_s: float | None  # None: no token came
    finished_s: float
    version: str = ""  # of the weights

    @property
    def queue_s(self) -> float:
        return (self.first_scheduled_s or self.finished_s) - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)
