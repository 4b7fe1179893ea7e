"""Every Prometheus metric, and nothing but metrics.

Names are vLLM's with the prefix `jaxinfer:`, so that its dashboards port by replacing the prefix.
Labels hold only the served model's name and our own enums, never what a client sent: the number of
series is fixed at start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, generate_latest

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.histogram import GAP_SECONDS, LONG_SECONDS, SECONDS, Histogram, one_two_five
from jaxinfer.stats import PoolStats, RequestStats, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REJECT_REASONS = (
    *("overloaded", "queue_timeout", "deadline", "draining", "loading", "breaker_open"),
    *("invalid", "unauthorized", "too_large", "too_slow"),
)
PAGE_STATES = ("used", "cached", "free")
COMPILE_PHASES = ("startup", "serving")
MAX_TOKENS = 131072  # of a request; bounds the buckets, which are made before the model is known


class Metrics:
    """Takes the facts of the engine (it is an `Observer`) and of the server, and renders them.

    Args:
        model_name: the one served name, the label of every metric.
    """

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self.tokens_sampled = 0  # since start
        self.tokens_computed = 0  # since start, without padding
        self._last_pool: PoolStats | None = None
        self._pool_source: Callable[[], PoolStats | None] = lambda: None
        self._compile_source: Callable[[], Mapping[str, int]] = dict
        self._num_compiled = dict.fromkeys(COMPILE_PHASES, 0)
        self._make_gauges()
        self._make_counters()
        self._make_histograms()

    # ---- the engine's facts

    def on_step(self, step: StepStats, pool: PoolStats) -> None:
        self.tokens_sampled += step.num_sampled
        self.tokens_computed += step.num_tokens
        self._generation_tokens.inc(step.num_sampled)
        self._iteration_tokens.observe(step.num_tokens)
        self._computed_tokens.inc(step.num_tokens)
        self._padded_tokens.inc(step.num_padded_tokens)
        if step.num_padded_tokens:
            self._padding_waste.set(1.0 - step.num_tokens / step.num_padded_tokens)
        self._count_pool(pool)

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT:
            self._aborted.inc()
        else:
            self._success[reason].inc()
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._request_prompt_tokens.observe(stats.num_prompt_tokens)
        self._request_generation_tokens.observe(stats.num_output_tokens)
        self._e2e.observe(stats.e2e_s)
        self._queue.observe(stats.queue_s)
        if stats.first_scheduled_s is not None and stats.first_token_s is not None:
            self._prefill.observe(stats.first_token_s - stats.first_scheduled_s)
            self._decode.observe(stats.finished_s - stats.first_token_s)

    def on_retry(self, num_sequences: int) -> None:
        self._retries.inc(num_sequences)

    def on_rebuild(self, duration_s: float) -> None:
        self._rebuilds.inc()

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def on_gap(self, gap_s: float, num_tokens: int) -> None:
        self._gap.observe(gap_s / num_tokens, num_tokens)

    # ---- the server's facts

    def on_reject(self, reason: str) -> None:
        """`reason`: one of REJECT_REASONS."""
        self._rejected[reason].inc()

    def on_breaker(self, state: int) -> None:
        """0: closed, 1: half-open, 2: open."""
        self._breaker.set(state)

    def on_loaded(
        self,
        *,
        version: str,
        cache_config: Mapping[str, object],
        memory_bytes: Mapping[str, int],
        startup_s: Mapping[str, float],
        pool_source: Callable[[], PoolStats],
        compile_source: Callable[[], Mapping[str, int]],
    ) -> None:
        """Once, when the model is ready.

        Args:
            cache_config: shown as labels of cache_config_info.
            memory_bytes: the plan, by kind.
            startup_s: seconds by phase; some pass side by side.
            pool_source: asked at each scrape, so that the gauges are right also when no step runs.
            compile_source: asked at each scrape: compilations so far by COMPILE_PHASES.
        """
        self._weights.info({"version": version})
        self._cache_config.info({k: str(v) for k, v in cache_config.items()})
        for phase, seconds in startup_s.items():
            self._startup.labels(**self._labels, phase=phase).set(seconds)
        for kind, size in memory_bytes.items():
            self._memory.labels(**self._labels, kind=kind).set(size)
        self._pool_source = pool_source
        self._compile_source = compile_source

    def render(self) -> bytes:
        """The exposition text."""
        pool = self._pool_source()
        if pool is not None:
            self._set_pool(pool)
        self._count_compilations()
        self._rss.set(resident_bytes())
        return generate_latest(self.registry)

    # ---- inside

    def _count_pool(self, pool: PoolStats) -> None:
        last, self._last_pool = self._last_pool, pool
        self._preemptions.inc(pool.num_preemptions - (last.num_preemptions if last else 0))
        queries = pool.prefix_query_tokens - (last.prefix_query_tokens if last else 0)
        self._prefix_queries.inc(queries)
        self._prefix_hits.inc(pool.prefix_hit_tokens - (last.prefix_hit_tokens if last else 0))

    def _count_compilations(self) -> None:
        counts = self._compile_source()
        for phase in COMPILE_PHASES:
            number = counts.get(phase, 0)
            self._compile_events[phase].inc(number - self._num_compiled[phase])
            self._num_compiled[phase] = number

    def _set_pool(self, pool: PoolStats) -> None:
        self._running.set(pool.num_running)
        self._waiting.set(pool.num_waiting)
        self._usage.set(pool.pages_used / max(pool.pages_total, 1))
        for state in PAGE_STATES:
            self._pages[state].set(getattr(pool, f"pages_{state}"))

    def _make_gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Sequences that run")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of KV pages owned by sequences")
        self._padding_waste = self._gauge(
            "padding_waste_ratio", "Share of the last step's tokens that was padding"
        )
        self._breaker = self._gauge(
            "circuit_breaker_state", "Whether new requests are let in: 0 all, 1 one by one, 2 none"
        )
        self._rss = self._gauge("process_resident_memory_bytes", "Resident memory of the server")
        pages = Gauge(
            "jaxinfer:kv_pages", "KV pages", ["model_name", "state"], registry=self.registry
        )
        self._pages = {s: pages.labels(**self._labels, state=s) for s in PAGE_STATES}
        self._startup = Gauge(
            "jaxinfer:startup_seconds",
            "Seconds from start to ready, by phase",
            ["model_name", "phase"],
            registry=self.registry,
        )
        self._memory = Gauge(
            "jaxinfer:memory_bytes",
            "Memory that was planned at start, by kind",
            ["model_name", "kind"],
            registry=self.registry,
        )
        self._cache_config = self._info("cache_config", "How the KV pool was planned")
        self._weights = self._info("weights_version", "The weights that answer")

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended choices")
        self._generation_tokens = self._counter("generation_tokens", "Tokens sampled")
        self._computed_tokens = self._counter("computed_tokens", "Tokens run, without padding")
        self._padded_tokens = self._counter("padded_tokens", "Tokens run, with padding")
        self._preemptions = self._counter("num_preemptions", "Preemptions")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._aborted = self._counter("aborted", "Choices ended because the client went away")
        self._retries = self._counter("request_retries", "Choices begun again after a failed step")
        self._rebuilds = self._counter("engine_rebuilds", "Times that the KV pool was made anew")
        success = Counter(
            "jaxinfer:request_success",
            "Choices ended, by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._success = {
            r: success.labels(**self._labels, finished_reason=r.value)
            for r in FinishReason
            if r is not FinishReason.ABORT
        }
        rejected = Counter(
            "jaxinfer:rejected",
            "Requests refused before they reached the engine",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._rejected = {r: rejected.labels(**self._labels, reason=r) for r in REJECT_REASONS}

        compile_events = Counter(
            "jaxinfer:compile_events",
            "XLA compilations: after the start there must be none",
            ["model_name", "phase"],
            registry=self.registry,
        )
        self._compile_events = {
            p: compile_events.labels(**self._labels, phase=p) for p in COMPILE_PHASES
        }

    def _make_histograms(self) -> None:
        tokens = one_two_five(MAX_TOKENS)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", SECONDS
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a choice", GAP_SECONDS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end", LONG_SECONDS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step", LONG_SECONDS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token", LONG_SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the end", LONG_SECONDS
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a choice", tokens
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a choice", tokens
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step, without padding", one_two_five(16384)
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"jaxinfer:{name}", text, tuple(self._labels), registry=self.registry).labels(
            **self._labels
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(
            f"jaxinfer:{name}", text, tuple(self._labels), registry=self.registry
        ).labels(**self._labels)

    def _info(self, name: str, text: str) -> Info:
        return Info(f"jaxinfer:{name}", text, tuple(self._labels), registry=self.registry).labels(
            **self._labels
        )

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"jaxinfer:{name}", text, bounds, labels=self._labels, registry=self.registry
        )


def resident_bytes() -> int:
    """Resident memory of this process; where the system does not tell, its peak, or 0."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        if sys.platform == "win32":
            return 0
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
