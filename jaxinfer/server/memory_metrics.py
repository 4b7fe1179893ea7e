"""Memory by kind, as it is now: what was planned and allocated, the parts of the KV pool, and the
process.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxinfer.server.metric_maker import MetricMaker
from jaxinfer.server.process_memory import peak_resident_bytes, resident_bytes
from jaxinfer.stats import PoolStats

PAGE_STATES = ("used", "cached", "free")
ALLOCATED = ("weights", "programs", "kv_pool")
KINDS = (*ALLOCATED, *(f"kv_{s}" for s in PAGE_STATES), "process", "host_rss", "host_rss_peak")


class MemoryMetrics:
    """memory_bytes{kind}, of KINDS.

    weights are those of all versions that are here. programs and kv_pool are what was allocated at
    start; kv_used, kv_cached and kv_free are its parts, by the shares of all engines' pages.
    `process` is the resident memory that is none of the first three: on a CPU these are in it too,
    on a GPU they are not.
    """

    def __init__(self, make: MetricMaker):
        self._bytes = make.gauges("memory_bytes", "Memory now, by kind", "kind", KINDS)
        self._resident = make.gauge(
            "process_resident_memory_bytes", "Resident memory of the server"
        )
        self._allocated: dict[str, int] = dict.fromkeys(ALLOCATED, 0)
        self._is_in_process = False
        self.weights_bytes = 0  # of all versions that are here; 0: as at start

    def on_loaded(self, plan: Mapping[str, int]) -> None:
        """`plan`: bytes of each of ALLOCATED; on a CPU also of `process`, as it was before."""
        self._allocated = {kind: plan.get(kind, 0) for kind in ALLOCATED}
        self._is_in_process = "process" in plan

    def by_kind(self, pool: PoolStats | None) -> dict[str, int]:
        """All of KINDS, in bytes."""
        resident = resident_bytes()
        allocated = {**self._allocated}
        allocated["weights"] = self.weights_bytes or allocated["weights"]
        inside = sum(allocated.values()) if self._is_in_process else 0
        return {
            **allocated,
            **self._of_pool(pool),
            "process": max(resident - inside, 0),
            "host_rss": resident,
            "host_rss_peak": max(peak_resident_bytes(), resident),
        }

    def refresh(self, pool: PoolStats | None) -> None:
        sizes = self.by_kind(pool)
        for kind, size in sizes.items():
            self._bytes[kind].set(size)
        self._resident.set(sizes["host_rss"])

    def _of_pool(self, pool: PoolStats | None) -> dict[str, int]:
        if pool is None or not pool.pages_total:
            return {f"kv_{state}": 0 for state in PAGE_STATES}
        page = self._allocated["kv_pool"] // pool.pages_total
        return {f"kv_{state}": getattr(pool, f"pages_{state}") * page for state in PAGE_STATES}
