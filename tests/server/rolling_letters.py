"""A process that stops in the middle of a rollout; run by test_rollout_restart.py.

    python -m tests.server.rolling_letters PHASE LOG

PHASE: "loading", "canary", "promoted". It says READY when it is there, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.server.rollout_world import HALF, Way, World, until, world


async def reach(w: World, phase: str) -> None:
    way = w.source.ways["v2"] = Way()
    if phase == "loading":
        way.may_load.clear()
    await w.order("v2", HALF)
    if phase != "loading":
        await until(lambda: w.role("v2") == "canary")
    if phase == "promoted":
        await w.rollouts.promote("v2")
    await until(lambda: w.log_path.exists() and w.records()[-1].get("phase") == phase)


async def main(phase: str, log: Path) -> None:
    async with world(log) as w:
        await reach(w, phase)
        sys.stdout.write("READY\n")
        sys.stdout.flush()
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
