"""A histogram that takes many equal observations at once.

prometheus-client's own takes one at a time; a decode step yields one gap for each of hundreds of
rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
GAP_SECONDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
LONG_SECONDS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to the first that is not below `limit`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            bounds.append(float(step * scale))
            if bounds[-1] >= limit:
                return tuple(bounds)
        scale *= 10


class Histogram(Collector):
    """Counts by upper bound. One writer at a time; a reader on another thread sees at worst a step
    less.

    Args:
        name, text: of the metric.
        bounds: rising upper bounds, without infinity.
        labels: fixed names and values.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        *,
        labels: dict[str, str],
        registry: CollectorRegistry,
    ):
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = labels
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(
            tuple(self._labels.values()), buckets=list(self._cumulative()), sum_value=self._sum
        )
        return [family]

    def _cumulative(self) -> Iterator[tuple[str, float]]:
        total = 0
        bounds = [str(b) for b in self._bounds] + ["+Inf"]
        for bound, count in zip(bounds, list(self._counts), strict=True):
            total += count
            yield bound, float(total)
