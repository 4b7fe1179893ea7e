"""What the system says there is, read from files written here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.runtime import memory_budget
from jaxinfer.runtime.memory_budget import (
    MemoryBudget,
    free_bytes,
    read_budget,
    resident_bytes,
)

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}"
    return {
        f"{at}memory.max": f"{limit}\n",
        f"{at}memory.current": f"{used}\n",
        f"{at}memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 9\n",
    }


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 8 * GIB),
        (v2("", "max", GIB), 8 * GIB),
        (v2("", str(4 * GIB), GIB), 3 * GIB),
        (v2("", str(4 * GIB), GIB, inactive=GIB // 2), 3 * GIB + GIB // 2),
        (v2("", str(32 * GIB), GIB), 8 * GIB),
        (v2("", "max", 0) | v2("a/b/", str(2 * GIB), GIB), GIB),
        (v2("a/", str(2 * GIB), GIB) | v2("a/b/", str(6 * GIB), GIB), GIB),
        (v2("", str(GIB), 2 * GIB), 0),
    ],
    ids=[
        "no group",
        "no limit",
        "limit",
        "idle file pages",
        "a limit above the machine",
        "own group",
        "a group above",
        "over its limit",
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_its_groups(
    tmp_path: Path, files: dict[str, str], want: int
):
    root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"} | files)
    assert free_bytes(root) == want


@pytest.mark.parametrize(("limit", "want"), [(3 * GIB, 2 * GIB), (2**63 - 4096, 8 * GIB)])
def test_cgroups_of_version_1_are_read(tmp_path: Path, limit: int, want: int):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(limit),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert free_bytes(root) == want


def test_a_system_that_does_not_tell_is_unknown(tmp_path: Path):
    assert free_bytes(tmp_path) is None
    assert resident_bytes(tmp_path) == 0


def test_this_machine_tells():
    got = read_budget(0.9)
    if not Path("/proc/meminfo").exists():
        pytest.skip("needs /proc")
    assert got.total_bytes is not None
    assert 10 << 20 < got.process_bytes < got.total_bytes < 1 << 50
    assert not got.is_gpu
    assert got.elsewhere() == MemoryBudget(None, 0, None)


def test_a_gpu_gives_a_share_of_what_it_has(monkeypatch: pytest.MonkeyPatch):
    def stats() -> dict[str, Any]:
        return {"bytes_limit": 1000, "bytes_in_use": 10}

    device = SimpleNamespace(memory_stats=stats)
    monkeypatch.setattr(memory_budget.jax, "devices", lambda: [device])
    got = read_budget(0.55)
    assert got == MemoryBudget(550, 0, 1000)
    assert got.is_gpu
    assert got.elsewhere() == got
