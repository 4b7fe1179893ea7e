"""How much memory there is to plan with: a GPU's, or what the system lets this process have.

Reads the device and /proc; decides nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

import jax

ROOT = Path("/")
UNLIMITED = 1 << 60  # cgroup v1 says a number above it where there is no limit
CGROUP_V2 = ("", "memory.max", "memory.current")  # folder below /sys/fs/cgroup, limit, usage
CGROUP_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """All in bytes."""

    total_bytes: int | None  # what weights, programs and pool may take in all; None: unknown
    process_bytes: int  # of it, what this process takes already; 0 on a GPU
    device_bytes: int | None  # a GPU's memory, of which a share is the total; None: a CPU

    @property
    def is_gpu(self) -> bool:
        return self.device_bytes is not None

    def beside(self, taken_bytes: int) -> MemoryBudget:
        """What is left beside models that take `taken_bytes` as they were planned. On a CPU they
        are in `process_bytes` already, and nothing changes.
        """
        if not self.is_gpu or self.total_bytes is None:
            return self
        return dataclasses.replace(self, total_bytes=max(0, self.total_bytes - taken_bytes))

    def elsewhere(self) -> MemoryBudget:
        """Of another machine with such a device: how much memory a CPU has there is not known."""
        return self if self.is_gpu else MemoryBudget(None, 0, None)


def read_budget(utilization: float) -> MemoryBudget:
    """`utilization`: the share of a GPU's memory that may be planned."""
    stats = jax.devices()[0].memory_stats() or {}
    device = stats.get("bytes_limit")
    if device is not None:
        return MemoryBudget(int(device * utilization), 0, device)
    own = resident_bytes(ROOT)
    free = free_bytes(ROOT)
    return MemoryBudget(None if free is None else own + free, own, None)


def free_bytes(root: Path) -> int | None:
    """What this process can still get: of the machine, and of its cgroups. None: not told."""
    free = [_of_meminfo(root), *_of_cgroups(root)]
    known = [number for number in free if number is not None]
    return max(0, min(known)) if known else None


def resident_bytes(root: Path) -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        pages = int((root / "proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _of_meminfo(root: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _of_cgroups(root: Path) -> list[int | None]:
    """Of every group from this process's own up to the root: each may have a limit."""
    free: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit, usage = CGROUP_V1 if controllers else CGROUP_V2
        groups = _upwards(root / "sys/fs/cgroup" / folder, path)
        free += (_of_cgroup(group, limit, usage) for group in groups)
    return free


def _upwards(mount: Path, path: str) -> list[Path]:
    """In a container the path may be the host's; the mount itself is then the own group."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _of_cgroup(folder: Path, limit: str, usage: str) -> int | None:
    """Limit less usage; file pages that nobody has used for a while count as free."""
    try:
        most, used = int(_text(folder / limit)), int(_text(folder / usage))
    except ValueError:  # "max", or no such file
        return None
    inactive = re.search(
        r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE
    )
    return None if most >= UNLIMITED else most - used + (int(inactive[1]) if inactive else 0)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
