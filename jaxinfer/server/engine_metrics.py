"""Metrics of what the engine does: steps, latencies, ended choices, the KV pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.histogram import GAP_SECONDS, LONG_SECONDS, SECONDS, one_two_five
from jaxinfer.server.live_window import LiveWindow
from jaxinfer.server.memory_metrics import PAGE_STATES
from jaxinfer.server.metric_maker import MetricMaker
from jaxinfer.stats import PoolStats, RequestStats, StepStats

COMPILE_PHASES = ("startup", "serving", "version")
MAX_TOKENS = 131072  # of a request; bounds the buckets, which are made before the model is known
MAX_STEP_TOKENS = 16384


class EngineMetrics:
    """Of all engines together.

    Args:
        clock: seconds, for what is told of the last ones.
    """

    def __init__(self, make: MetricMaker, *, clock: Callable[[], float] = time.monotonic):
        self.tokens_sampled = 0  # since start
        self.tokens_computed = 0  # since start, without padding
        self._window = LiveWindow(clock=clock)
        self._num_compiled = dict.fromkeys(COMPILE_PHASES, 0)
        self._make_gauges(make)
        self._make_counters(make)
        self._make_histograms(make)

    def on_step(self, step: StepStats, pool: PoolStats, last: PoolStats | None) -> None:
        """`last`: the pool of the same engine, a step before."""
        self.tokens_sampled += step.num_sampled
        self.tokens_computed += step.num_tokens
        self._window.add(step)
        self._generation_tokens.inc(step.num_sampled)
        self._iteration_tokens.observe(step.num_tokens)
        self._computed_tokens.inc(step.num_tokens)
        self._padded_tokens.inc(step.num_padded_tokens)
        self._count_pool(pool, last)

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

    def refresh(self, pool: PoolStats | None, compiled: Mapping[str, int]) -> None:
        """Sets what is read, not counted.

        Args:
            pool: those of all engines together; None before there is one.
            compiled: compilations so far by COMPILE_PHASES.
        """
        self._padding_waste.set(self._window.padding_waste)
        self._generation_speed.set(self._window.generation_speed)
        self._prompt_speed.set(self._window.prompt_speed)
        if pool is not None:
            self._set_pool(pool)
        self._count_compilations(compiled)

    # ---- inside

    def _count_pool(self, pool: PoolStats, last: PoolStats | None) -> None:
        self._preemptions.inc(pool.num_preemptions - (last.num_preemptions if last else 0))
        queries = pool.prefix_query_tokens - (last.prefix_query_tokens if last else 0)
        self._prefix_queries.inc(queries)
        self._prefix_hits.inc(pool.prefix_hit_tokens - (last.prefix_hit_tokens if last else 0))

    def _count_compilations(self, counts: Mapping[str, int]) -> None:
        for phase in COMPILE_PHASES:
            number = counts.get(phase, 0)
            self._compile_events[phase].inc(number - self._num_compiled[phase])
            self._num_compiled[phase] = number

    def _set_pool(self, pool: PoolStats) -> None:
        self._running.set(pool.num_running)
        self._waiting.set(pool.num_waiting)
        self._paused.set(pool.num_paused)
        self._usage.set(pool.pages_used / max(pool.pages_total, 1))
        for state in PAGE_STATES:
            self._pages[state].set(getattr(pool, f"pages_{state}"))

    def _make_gauges(self, make: MetricMaker) -> None:
        self._running = make.gauge("num_requests_running", "Sequences that run")
        self._waiting = make.gauge("num_requests_waiting", "Sequences that wait")
        self._paused = make.gauge("num_requests_paused", "Sequences whose reader is behind")
        self._usage = make.gauge("kv_cache_usage_perc", "Share of KV pages owned by sequences")
        self._pages = make.gauges("kv_pages", "KV pages", "state", PAGE_STATES)
        self._padding_waste = make.gauge(
            "padding_waste_ratio", "Share of the last minute's tokens that was padding"
        )
        self._generation_speed = make.gauge(
            "generation_tokens_per_second", "Tokens sampled per second, lately"
        )
        self._prompt_speed = make.gauge(
            "prompt_tokens_per_second", "Prompt tokens computed per second, lately"
        )

    def _make_counters(self, make: MetricMaker) -> None:
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of ended choices")
        self._generation_tokens = make.counter("generation_tokens", "Tokens sampled")
        self._computed_tokens = make.counter("computed_tokens", "Tokens run, without padding")
        self._padded_tokens = make.counter("padded_tokens", "Tokens run, with padding")
        self._preemptions = make.counter("num_preemptions", "Preemptions")
        self._prefix_queries = make.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = make.counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._aborted = make.counter("aborted", "Choices ended because the client went away")
        self._retries = make.counter("request_retries", "Choices begun again after a failed step")
        self._rebuilds = make.counter("engine_rebuilds", "Times that the KV pool was made anew")
        ends = [r for r in FinishReason if r is not FinishReason.ABORT]
        success = make.counters(
            "request_success",
            "Choices ended, by reason",
            "finished_reason",
            [r.value for r in ends],
        )
        self._success = {r: success[r.value] for r in ends}
        self._compile_events = make.counters(
            "compile_events",
            "XLA compilations: after the start there must be none but for another version",
            "phase",
            COMPILE_PHASES,
        )

    def _make_histograms(self, make: MetricMaker) -> None:
        tokens = one_two_five(MAX_TOKENS)
        self._ttft = make.histogram(
            "time_to_first_token_seconds", "From arrival to the first token", SECONDS
        )
        self._gap = make.histogram(
            "inter_token_latency_seconds", "Between two tokens of a choice", GAP_SECONDS
        )
        self._e2e = make.histogram(
            "e2e_request_latency_seconds", "From arrival to the end", LONG_SECONDS
        )
        self._queue = make.histogram(
            "request_queue_time_seconds", "From arrival to the first step", LONG_SECONDS
        )
        self._prefill = make.histogram(
            "request_prefill_time_seconds", "From the first step to the first token", LONG_SECONDS
        )
        self._decode = make.histogram(
            "request_decode_time_seconds", "From the first token to the end", LONG_SECONDS
        )
        self._request_prompt_tokens = make.histogram(
            "request_prompt_tokens", "Prompt tokens of a choice", tokens
        )
        self._request_generation_tokens = make.histogram(
            "request_generation_tokens", "Output tokens of a choice", tokens
        )
        self._iteration_tokens = make.histogram(
            "iteration_tokens_total",
            "Tokens of a step, without padding",
            one_two_five(MAX_STEP_TOKENS),
        )
