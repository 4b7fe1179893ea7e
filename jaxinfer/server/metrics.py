"""Every Prometheus metric, and nothing but metrics.

Names are vLLM's with the prefix `jaxinfer:`, so that its dashboards port by replacing the prefix.
Labels hold only the served model's name, our own enums and the versions that operators load, never
what a client sent: but for those of versions, the number of series is fixed at start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.admission import Admission
from jaxinfer.server.engine_metrics import EngineMetrics
from jaxinfer.server.engine_observer import EngineObserver
from jaxinfer.server.memory_metrics import MemoryMetrics
from jaxinfer.server.metric_maker import MetricMaker
from jaxinfer.server.metrics_snapshot import snapshot
from jaxinfer.server.queue_metrics import QueueMetrics
from jaxinfer.server.served_versions import ServedVersions
from jaxinfer.server.version_metrics import VersionMetrics
from jaxinfer.stats import PoolStats, RequestStats, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REJECT_REASONS = (
    *("overloaded", "queue_timeout", "deadline", "draining", "loading", "breaker_open"),
    *("invalid", "unauthorized", "too_large", "too_slow"),
)


class Metrics:
    """Takes the facts of the engine (it is an `Observer`) and of the server, and renders them.

    A further engine of the process has an observer of its own, from `for_engine`.

    Args:
        model_name: the one served name, the label of every metric.
        clock: seconds, for what is told of the last ones.
    """

    def __init__(self, model_name: str, *, clock: Callable[[], float] = time.monotonic):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        make = MetricMaker(self.registry, self._labels)
        self._engine = EngineMetrics(make, clock=clock)
        self._versions = VersionMetrics(self._labels)
        self.registry.register(self._versions)
        self._turn = threading.Lock()
        self._first = self.for_engine()
        self._memory = MemoryMetrics(make)
        self._pool_source: Callable[[], PoolStats | None] = lambda: None
        self._compile_source: Callable[[], Mapping[str, int]] = dict
        self._startup = make.gauge_of(
            "startup_seconds", "Seconds from start to ready, by phase", "phase"
        )
        self._cache_config = make.info("cache_config", "How the KV pool was planned")
        self._weights = make.info("weights_version", "The weights of the stable version")
        self._growth_alarm = make.gauge(
            "memory_growth_alarm", "1 while memory keeps rising at equal load"
        )
        self._rejected = make.counters(
            "rejected", "Requests refused before they reached the engine", "reason", REJECT_REASONS
        )
        self._breaker = make.gauge(
            "circuit_breaker_state", "0: closed, 1: half-open, 2: open (new requests get 503)"
        )
        self._readers_cut = make.counter("readers_cut", "Clients cut off that read nothing")

    # ---- the engine's facts

    @property
    def tokens_sampled(self) -> int:
        """Since start."""
        return self._engine.tokens_sampled

    @property
    def tokens_computed(self) -> int:
        """Since start, without padding."""
        return self._engine.tokens_computed

    def for_engine(self) -> EngineObserver:
        """For one more engine, whose numbers are added to those of the others."""
        return EngineObserver(self._engine, self._versions, self._turn)

    def on_step(self, step: StepStats, pool: PoolStats) -> None:
        self._first.on_step(step, pool)

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        self._first.on_finish(stats, reason)

    def on_retry(self, num_sequences: int) -> None:
        self._first.on_retry(num_sequences)

    def on_rebuild(self, duration_s: float) -> None:
        self._first.on_rebuild(duration_s)

    def on_first_token(self, ttft_s: float, version: str) -> None:
        self._first.on_first_token(ttft_s, version)

    def on_gap(self, gap_s: float, num_tokens: int, version: str) -> None:
        self._first.on_gap(gap_s, num_tokens, version)

    def on_failed_step(self, version: str) -> None:
        """On the event loop."""
        self._versions.on_failed_step(version)

    # ---- the server's facts

    def on_reject(self, reason: str) -> None:
        """`reason`: one of REJECT_REASONS."""
        self._rejected[reason].inc()

    def on_growth(self, is_alarm: bool) -> None:
        """Memory has begun, or ceased, to keep rising at equal load."""
        self._growth_alarm.set(is_alarm)

    def on_reader_cut(self) -> None:
        """A client that took nothing for too long was cut off."""
        self._readers_cut.inc()

    def on_breaker(self, state: int) -> None:
        """0: closed, 1: half-open, 2: open."""
        self._breaker.set(state)

    def watch_queue(self, admission: Admission) -> None:
        """Once: gauges by class, asked for at each scrape."""
        self.registry.register(QueueMetrics(admission, self._labels))

    def watch_versions(self, versions: ServedVersions) -> None:
        """Once: whose numbers are shown by version."""
        self._versions.watch(versions)

    def on_loaded(
        self,
        *,
        version: str,
        cache_config: Mapping[str, object],
        memory_source: Callable[[], Mapping[str, int]],
        startup_s: Mapping[str, float],
        pool_source: Callable[[], PoolStats | None],
        compile_source: Callable[[], Mapping[str, int]],
    ) -> None:
        """Once, when the model is ready.

        Args:
            cache_config: shown as labels of cache_config_info.
            memory_source: asked at each scrape: what all versions hold, by kind; see MemoryMetrics.
            startup_s: seconds by phase; some pass side by side.
            pool_source: asked at each scrape, so that the gauges are right also when no step runs:
                the pools of all engines together.
            compile_source: asked at each scrape: compilations so far by COMPILE_PHASES.
        """
        self._weights.info({"version": version})
        self._cache_config.info({k: str(v) for k, v in cache_config.items()})
        for phase, seconds in startup_s.items():
            self._startup(phase).set(seconds)
        self._memory.on_loaded(memory_source)
        self._pool_source = pool_source
        self._compile_source = compile_source

    # ---- who reads them

    def memory_by_kind(self) -> dict[str, int]:
        """Bytes now; see MemoryMetrics."""
        return self._memory.by_kind(self._pool_source())

    def by_version(self) -> list[dict[str, Any]]:
        """The numbers of each version that is here; see VersionMetrics."""
        return self._versions.rows()

    def render(self) -> bytes:
        """The exposition text."""
        self._refresh()
        return generate_latest(self.registry)

    def snapshot(self) -> dict[str, Any]:
        """The same numbers for the dashboard; see metrics_snapshot."""
        self._refresh()
        return snapshot(self.registry)

    def _refresh(self) -> None:
        pool = self._pool_source()
        self._engine.refresh(pool, self._compile_source())
        self._memory.refresh(pool)
        stable = self._versions.stable
        if stable is not None:
            self._weights.info({"version": stable})
