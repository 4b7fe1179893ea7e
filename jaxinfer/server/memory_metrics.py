"""Memory by kind, as it is now: what is planned and allocated, the parts of the KV pool, and the
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxinfer.server.metric_maker import MetricMaker
from jaxinfer.server.process_memory import peak_resident_bytes, resident_bytes
from jaxinfer.stats import PoolStats

PAGE_STATES = ("used", "cached", "free")
ALLOCATED = ("weights", "programs", "kv_pool")
KINDS = (*ALLOCATED, *(f"kv_{s}" for s in PAGE_STATES), "process", "host_rss", "host_rss_peak")


class MemoryMetrics:
    """memory_bytes{kind}, of KINDS.

    weights, programs and kv_pool are those of all versions and engines that are here; kv_used,
    kv_cached and kv_free are parts of the last, by the shares of all engines' pages.
    `process` is the resident memory that is none of the first three: on a CPU these are in it too,
    on a GPU they are not.
    """

    def __init__(self, make: MetricMaker):
        self._bytes = make.gauges("memory_bytes", "Memory now, by kind", "kind", KINDS)
        self._resident = make.gauge(
            "process_resident_memory_bytes", "Resident memory of the server"
        )
        self._source: Callable[[], Mapping[str, int]] = dict

    def on_loaded(self, source: Callable[[], Mapping[str, int]]) -> None:
        """`source`: bytes now of each of ALLOCATED; on a CPU also of `process`, as it was."""
        self._source = source

    def by_kind(self, pool: PoolStats | None) -> dict[str, int]:
        """All of KINDS, in bytes."""
        resident = resident_bytes()
        found = self._source()
        allocated = {kind: found.get(kind, 0) for kind in ALLOCATED}
        inside = sum(allocated.values()) if "process" in found else 0
        return {
            **allocated,
            **_of_pool(pool, allocated["kv_pool"]),
            "process": max(resident - inside, 0),
            "host_rss": resident,
            "host_rss_peak": max(peak_resident_bytes(), resident),
        }

    def refresh(self, pool: PoolStats | None) -> None:
        sizes = self.by_kind(pool)
        for kind, size in sizes.items():
            self._bytes[kind].set(size)
        self._resident.set(sizes["host_rss"])


def _of_pool(pool: PoolStats | None, num_bytes: int) -> dict[str, int]:
    if pool is None or not pool.pages_total:
        return {f"kv_{state}": 0 for state in PAGE_STATES}
    page = num_bytes // pool.pages_total
    return {f"kv_{state}": getattr(pool, f"pages_{state}") * page for state in PAGE_STATES}
