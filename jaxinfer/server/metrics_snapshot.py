"""The numbers of a registry as plain data, for the dashboard: the same as the exposition text has.

Names come without prefix and without `_total`; the model's name, a label of all, is left out. What
comes and goes with a version of the weights is told by VersionMetrics.rows.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from jaxinfer.server.metric_maker import PREFIX

OF_VERSIONS = f"{PREFIX}version_"


def snapshot(registry: CollectorRegistry) -> dict[str, Any]:
    """Name -> value; or label value -> value; or {bounds, counts, sum} of a histogram.

    `counts` are those between bounds, not cumulative, the last one above all bounds. Infos map
    their labels to texts.
    """
    return {
        family.name.removeprefix(PREFIX): _family(family)
        for family in registry.collect()
        if not family.name.startswith(OF_VERSIONS)
    }


def _family(family: Metric) -> Any:
    if family.type == "histogram":
        return _histogram(family)
    if family.type == "info":
        return {k: v for s in family.samples for k, v in _own_labels(s.labels).items()}
    values = {
        ",".join(_own_labels(s.labels).values()): s.value
        for s in family.samples
        if not s.name.endswith("_created")
    }
    return values[""] if values.keys() == {""} else values


def _histogram(family: Metric) -> dict[str, Any]:
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    totals = [int(s.value) for s in buckets]
    return {
        "bounds": [float(s.labels["le"]) for s in buckets[:-1]],
        "counts": [n - before for before, n in zip([0, *totals], totals, strict=False)],
        "sum": next(s.value for s in family.samples if s.name.endswith("_sum")),
    }


def _own_labels(labels: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in labels.items() if k != "model_name"}
