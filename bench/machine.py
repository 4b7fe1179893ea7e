"""What the machine says: time, CPU time of this process and of others, memory, versions.

Knows nothing of models. Where the system does not tell (no /proc), a reading is None.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jaxinfer

PROC = Path("/proc")
IDLE, IOWAIT, STEAL = 3, 4, 7  # columns of the first line of /proc/stat (proc(5))


@dataclass(frozen=True, slots=True)
class Reading:
    """The clocks at one moment, in seconds."""

    time_s: float  # monotonic
    own_s: float  # CPU time of this process and of its children that have ended
    busy_s: float | None  # CPU time of the whole machine, stolen time included


@dataclass(frozen=True, slots=True)
class Span:
    """What passed between two readings."""

    wall_s: float
    cpu_s: float  # of this process and of its children that have ended
    others: float | None  # cores that all other processes used, on average

    @classmethod
    def between(cls, start: Reading, end: Reading) -> Span:
        wall, own = end.time_s - start.time_s, end.own_s - start.own_s
        if start.busy_s is None or end.busy_s is None or wall <= 0:
            return cls(wall, own, None)
        return cls(wall, own, max(0.0, end.busy_s - start.busy_s - own) / wall)


Clocks = Callable[[], Reading]


def read_clocks() -> Reading:
    children = os.times()
    return Reading(
        time_s=time.monotonic(),
        own_s=time.process_time() + children.children_user + children.children_system,
        busy_s=busy_seconds(PROC),
    )


def busy_seconds(proc: Path) -> float | None:
    """Seconds since boot that the machine's cores worked, summed; None without such a file."""
    try:
        first = (proc / "stat").read_text().partition("\n")[0]
    except OSError:
        return None
    ticks = [int(word) for word in first.split()[1 : STEAL + 2]]  # guests count as user time
    return (sum(ticks) - ticks[IDLE] - ticks[IOWAIT]) / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(process: Path = PROC / "self") -> int | None:
    """The most memory that a process has had resident so far.

    VmHWM, and not getrusage, which begins with the peak of whoever started the process.
    """
    try:
        status = (process / "status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def cpu_seconds(process: Path = PROC / "self") -> float | None:
    """CPU time of a process and of its children that have ended; None without such a file."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def device_peak_bytes() -> int | None:
    """The most of the device's memory that has been in use; None on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def cpu_model(proc: Path = PROC) -> str:
    """The processor's name as it gives it, or its architecture."""
    try:
        about = (proc / "cpuinfo").read_text()
    except OSError:
        about = ""
    found = re.search(r"^model name\s*:\s*(.+)$", about, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """Versions, device and cores: what a figure depends on besides the code."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxinfer": jaxinfer.__version__,
        "device": jax.devices()[0].device_kind,
        "cpu": cpu_model(),
        "cores": num_cores(),
    }
