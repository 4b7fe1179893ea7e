"""How a metric is made: with our prefix, the labels that all have, and at most one label
more, whose values are known when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from jaxinfer.server.histogram import Histogram

PREFIX = "jaxinfer:"
Kind = TypeVar("Kind", Gauge, Counter, Info)


class MetricMaker:
    """Makes metrics in one registry.

    Args:
        labels: names and values that every metric has.
    """

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]):
        self.registry = registry
        self._labels = labels

    def gauge(self, name: str, text: str) -> Gauge:
        return self._family(Gauge, name, text).labels(**self._labels)

    def gauges(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        """One for each of `values`."""
        family = self._family(Gauge, name, text, label)
        return {v: family.labels(**self._labels, **{label: v}) for v in values}

    def gauge_of(self, name: str, text: str, label: str) -> Callable[[str], Gauge]:
        """For values of the label that only the start of the server tells; never a client's."""
        family = self._family(Gauge, name, text, label)
        return lambda value: family.labels(**self._labels, **{label: value})

    def counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(**self._labels)

    def counters(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> dict[str, Counter]:
        """One for each of `values`."""
        family = self._family(Counter, name, text, label)
        return {v: family.labels(**self._labels, **{label: v}) for v in values}

    def info(self, name: str, text: str) -> Info:
        return self._family(Info, name, text).labels(**self._labels)

    def histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, bounds, labels=self._labels, registry=self.registry)

    def _family(self, kind: type[Kind], name: str, text: str, *more: str) -> Kind:
        return kind(PREFIX + name, text, (*self._labels, *more), registry=self.registry)
