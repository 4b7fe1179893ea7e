"""What is open in each class, asked for at each scrape.

Labels are the names of classes, which the operator chose: their number is fixed at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxinfer.server.admission import Admission
from jaxinfer.server.priority_class import PriorityClass


class QueueMetrics(Collector):
    """Gauges with the label `priority_class`."""

    def __init__(self, admission: Admission, labels: Mapping[str, str]):
        self._classes = admission.classes.classes
        self._labels = labels
        self._gauges: tuple[tuple[str, str, Callable[[PriorityClass], int]], ...] = (
            (
                "open_requests",
                "Choices that are queued or running",
                lambda c: admission.num_open_of(c.name),
            ),
            (
                "queue_depth",
                "Calls that have got no token yet",
                lambda c: admission.forecast.num_waiting(c.priority),
            ),
            (
                "open_tokens",
                "Prompt tokens of open calls, and tokens that they may still produce",
                lambda c: admission.open_tokens_of(c.name),
            ),
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, text, value in self._gauges:
            family = GaugeMetricFamily(
                f"jaxinfer:{name}", text, labels=[*self._labels, "priority_class"]
            )
            for found in self._classes:
                family.add_metric([*self._labels.values(), found.name], value(found))
            yield family
