"""What one engine tells, added to what all engines of the process count together."""

from __future__ import annotations

import threading

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.engine_metrics import EngineMetrics
from jaxinfer.server.version_metrics import VersionMetrics
from jaxinfer.stats import PoolStats, RequestStats, StepStats


class EngineObserver:
    """An `Observer`, for one engine: what it says since its start is not another's.

    Args:
        engines, versions: what is counted of all.
        turn: held meanwhile: every engine tells on a thread of its own.
    """

    def __init__(self, engines: EngineMetrics, versions: VersionMetrics, turn: threading.Lock):
        self._engines = engines
        self._versions = versions
        self._turn = turn
        self._last: PoolStats | None = None

    def on_step(self, step: StepStats, pool: PoolStats) -> None:
        last, self._last = self._last, pool
        with self._turn:
            self._engines.on_step(step, pool, last)
            self._versions.on_step(step)

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        with self._turn:
            self._engines.on_finish(stats, reason)
            self._versions.on_finish(stats, reason)

    def on_retry(self, num_sequences: int) -> None:
        self._engines.on_retry(num_sequences)

    def on_rebuild(self, duration_s: float) -> None:
        self._engines.on_rebuild(duration_s)

    def on_first_token(self, ttft_s: float, version: str) -> None:
        self._engines.on_first_token(ttft_s)
        self._versions.on_first_token(ttft_s, version)

    def on_gap(self, gap_s: float, num_tokens: int, version: str) -> None:
        self._engines.on_gap(gap_s, num_tokens)
        self._versions.on_gap(gap_s, num_tokens, version)
