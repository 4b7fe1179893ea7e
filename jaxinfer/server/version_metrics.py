"""What each version of the weights does, while it is here: series that come and go with it.

Labels are names of versions, which operators load: at most a handful. What is counted of a version
is forgotten when it is no longer here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.metric_maker import PREFIX
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.served_versions import ServedVersions
from jaxinfer.stats import RequestStats, StepStats


@dataclass(slots=True)
class Seconds:
    """Durations, without keeping them."""

    count: int = 0
    sum: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """`times` that share `seconds`."""
        self.count += times
        self.sum += seconds


@dataclass(slots=True)
class VersionCounts:
    """Of one version, since it is here. Steps and ends are written by its engine's thread, the
    rest on the event loop.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_sampled: int = 0  # tokens that came out
    num_computed: int = 0  # tokens run, without padding
    ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    ttft: Seconds = field(default_factory=Seconds)
    gap: Seconds = field(default_factory=Seconds)  # between two tokens of a choice


COUNTERS: tuple[tuple[str, str, Callable[[VersionCounts], int]], ...] = (
    ("version_steps", "Engine steps that were read", lambda c: c.num_steps),
    ("version_failed_steps", "Engine steps that failed", lambda c: c.num_failed_steps),
    ("version_generation_tokens", "Tokens sampled", lambda c: c.num_sampled),
    ("version_computed_tokens", "Tokens run, without padding", lambda c: c.num_computed),
)
SUMMARIES: tuple[tuple[str, str, Callable[[VersionCounts], Seconds]], ...] = (
    (
        "version_time_to_first_token_seconds",
        "From arrival to the first token",
        lambda c: c.ttft,
    ),
    ("version_inter_token_latency_seconds", "Between two tokens of a choice", lambda c: c.gap),
)


class VersionMetrics(Collector):
    """Takes the facts, as an `Observer` does.

    Args:
        labels: that every metric has.
    """

    def __init__(self, labels: Mapping[str, str]):
        self._labels = labels
        self._versions: ServedVersions | None = None
        self._counts: dict[str, VersionCounts] = {}

    def watch(self, versions: ServedVersions) -> None:
        """Whose versions are shown."""
        self._versions = versions

    @property
    def stable(self) -> str | None:
        model = None if self._versions is None else self._versions.stable
        return None if model is None else model.version

    def on_step(self, step: StepStats) -> None:
        counts = self._of(step.version)
        counts.num_steps += 1
        counts.num_sampled += step.num_sampled
        counts.num_computed += step.num_tokens

    def on_failed_step(self, version: str) -> None:
        self._of(version).num_failed_steps += 1

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        self._of(stats.version).ended[reason] += 1

    def on_first_token(self, ttft_s: float, version: str) -> None:
        self._of(version).ttft.add(ttft_s)

    def on_gap(self, gap_s: float, num_tokens: int, version: str) -> None:
        self._of(version).gap.add(gap_s, num_tokens)

    def collect(self) -> Iterator[Metric]:
        here = self._here()
        self._forget_others(here)
        for name, text, value in self._gauges():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=self._names())
            for model in here:
                gauge.add_metric(self._values(model), value(model))
            yield gauge
        yield self._roles(here)
        yield self._ends(here)
        for name, text, value in COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=self._names())
            for model in here:
                counter.add_metric(self._values(model), value(self._of(model.version)))
            yield counter
        for name, text, seconds_of in SUMMARIES:
            summary = SummaryMetricFamily(PREFIX + name, text, labels=self._names())
            for model in here:
                seconds = seconds_of(self._of(model.version))
                summary.add_metric(self._values(model), seconds.count, seconds.sum)
            yield summary

    def rows(self) -> list[dict[str, Any]]:
        """The same for the dashboard, one of each version that is here."""
        return [self._row(model) for model in self._here()]

    # ---- inside

    def _row(self, model: ServedModel) -> dict[str, Any]:
        assert self._versions is not None
        counts = self._of(model.version)
        return {
            "version": model.version,
            "root": model.root,
            "role": self._versions.role_of(model.version),
            **{name.removeprefix("version_"): v(model) for name, _, v in self._gauges()},
            **{name.removeprefix("version_"): v(counts) for name, _, v in COUNTERS},
            "ended": {reason.value: number for reason, number in counts.ended.items()},
            **{
                name.removeprefix("version_"): {"count": v(counts).count, "sum": v(counts).sum}
                for name, _, v in SUMMARIES
            },
        }

    def _gauges(self) -> tuple[tuple[str, str, Callable[[ServedModel], float]], ...]:
        versions = self._versions
        if versions is None:
            return ()
        return (
            (
                "version_share",
                "Share of the calls that name no version",
                lambda m: versions.share_of(m.version),
            ),
            (
                "version_open_calls",
                "Calls that have not ended",
                lambda m: versions.num_calls(m.version),
            ),
            ("version_weights_bytes", "Weights on the device", lambda m: m.weights_bytes),
        )

    def _roles(self, here: tuple[ServedModel, ...]) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}version_role",
            "1: stable, canary, standby (answers who names it) or leaving (ends its calls)",
            labels=[*self._names(), "role"],
        )
        for model in here:
            assert self._versions is not None
            role = self._versions.role_of(model.version)
            family.add_metric([*self._values(model), role], 1)
        return family

    def _ends(self, here: tuple[ServedModel, ...]) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}version_ended",
            "Choices ended, by reason",
            labels=[*self._names(), "finished_reason"],
        )
        for model in here:
            for reason, number in self._of(model.version).ended.items():
                family.add_metric([*self._values(model), reason.value], number)
        return family

    def _names(self) -> list[str]:
        return [*self._labels, "version"]

    def _values(self, model: ServedModel) -> list[str]:
        return [*self._labels.values(), model.version]

    def _here(self) -> tuple[ServedModel, ...]:
        return () if self._versions is None else self._versions.here

    def _forget_others(self, here: tuple[ServedModel, ...]) -> None:
        names = {model.version for model in here}
        for version in list(self._counts):
            if version not in names:
                self._counts.pop(version, None)

    def _of(self, version: str) -> VersionCounts:
        counts = self._counts.get(version)
        return self._counts.setdefault(version, VersionCounts()) if counts is None else counts
