"""Tells metrics and log when memory begins and ceases to keep rising. It ends nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from jaxinfer.server.memory_census import census, commonest_types
from jaxinfer.server.memory_watch import Growth, MemorySample, MemoryWatch
from jaxinfer.server.state import ServerState

log = logging.getLogger(__name__)


class GrowthAlarm:
    """Samples the process when it is asked to; that costs a millisecond or so, most of it the count
    of Python's memory blocks.

    Args:
        watch: decides.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        watch: MemoryWatch,
        state: ServerState,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._watch = watch
        self._state = state
        self._clock = clock

    def sample(self) -> None:
        """On the event loop, every few seconds; does nothing before there is a model."""
        if self._state.model is None:
            return
        before = self._watch.alarm
        sizes = self._state.metrics.memory_by_kind()
        if not self._watch.take(self._sample(sizes)):
            return
        alarm = self._watch.alarm
        self._state.metrics.on_growth(alarm is not None)
        if alarm is not None:
            log.warning("%s", began_line(alarm, sizes, commonest_types()))
        elif before is not None:
            log.warning("%s", ended_line(before, sizes))

    def _sample(self, sizes: Mapping[str, int]) -> MemorySample:
        pool = self._state.pool_stats
        assert pool is not None
        return MemorySample(
            now_s=self._clock(),
            resident_bytes=sizes["host_rss"],
            load=pool.num_running + pool.num_waiting,
            fill=1.0 - pool.pages_free / max(pool.pages_total, 1),
            census=census(self._state),
        )


def began_line(growth: Growth, sizes: Mapping[str, int], types: Sequence[tuple[str, int]]) -> str:
    """What rose, who can own it, and what grew with it.

    Args:
        sizes: memory_bytes by kind.
        types: most numerous Python objects.
    """
    grown = ", ".join(f"{name} {a:,} -> {b:,}" for name, (a, b) in growth.grown.items())
    parts = " + ".join(f"{kind} {_mib(sizes[kind])}" for kind in ("weights", "programs", "kv_pool"))
    return (
        f"memory keeps rising: +{_mib(growth.rise_bytes)} in {growth.seconds / 60:.0f} min "
        f"{growth.load}; resident {_mib(sizes['host_rss'])}. Not {parts}, which do not change: the "
        f"rest of the process, now {_mib(sizes['process'])}. With it grew: "
        f"{grown or 'nothing that is counted, so native memory'}"
        + (f". Most numerous Python objects: {_counts(types)}" if types else "")
    )


def ended_line(growth: Growth, sizes: Mapping[str, int]) -> str:
    """How much of the growth is left."""
    left = sizes["host_rss"] - growth.low_bytes
    return (
        f"memory no longer rises: resident {_mib(sizes['host_rss'])}, {_mib(abs(left))} "
        f"{'above' if left >= 0 else 'below'} where the growth began"
    )


def _counts(types: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in types)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
