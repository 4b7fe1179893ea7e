"""What lives in the server and could grow, counted at small cost: for naming the owner of a growth.

Counts only, no contents. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections import Counter

from jaxinfer.server.state import ServerState

MAX_BLOCKS = 4_000_000  # with more, objects are not looked at one by one: 0.1 s and up


def census(state: ServerState) -> dict[str, int]:
    """Name -> how many, of what belongs to requests, to the system and to Python."""
    counts = {
        "open requests": state.admission.num_open,
        "asyncio tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "open files": _num_open_files(),
        "Python memory blocks": sys.getallocatedblocks(),
    }
    pool = state.pool_stats
    if pool is not None:
        counts["open streams"] = state.num_open
        counts["sequences"] = pool.num_running + pool.num_waiting
        counts["pages with content"] = pool.pages_used + pool.pages_cached
    return counts


def commonest_types(number: int = 5) -> list[tuple[str, int]]:
    """The most numerous types of objects that the garbage collector follows, made since READY (what
    was there before is frozen); none if there are too many to look at.
    """
    if sys.getallocatedblocks() > MAX_BLOCKS:
        return []
    kinds = Counter(type(o) for o in gc.get_objects())
    return [(kind.__qualname__, n) for kind, n in kinds.most_common(number)]


def _num_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
