"""Requests of every kind at random times, whose replies are known for each version."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import httpx

from bench.service.client import Call, send

MIN_GAIN = 1.1  # throughput of twice the clients, up to the knee
MAX_CLIENTS = 64
Said = tuple[object, ...]
Window = tuple[float, float]
"""From and to, monotonic seconds."""


@dataclass(slots=True)
class Findings:
    """What came back."""

    num_sent: int = 0
    num_compared: int = 0
    by_version: Counter[str] = field(default_factory=Counter[str])
    different: list[Call] = field(default_factory=list[Call])  # equal to no version's solo reply
    errors: Counter[str] = field(default_factory=Counter[str])
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    # between two events of a stream: when the second came, monotonic, and the seconds

    def gaps_in(self, windows: Sequence[Window]) -> list[float]:
        """Seconds of those that overlap one of the windows."""
        ends = [end for _, end in windows]
        found: list[float] = []
        for at_s, gap_s in self.gaps:
            place = bisect_left(ends, at_s - gap_s)
            if place < len(windows) and windows[place][0] <= at_s:
                found.append(gap_s)
        return found


class Traffic:
    """Towards one server.

    Args:
        solo: version -> what each of `calls` is answered alone.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        calls: Sequence[Call],
        solo: Mapping[str, Sequence[Said]],
        seed: int = 0,
    ):
        self._client, self._calls, self._solo = client, calls, solo
        self._random = Random(seed)

    async def capacity(self, seconds: float) -> tuple[int, float]:
        """Clients at the knee of throughput, found by doubling, and replies per second there."""
        clients, best = 1, await self._closed(1, seconds)
        while clients < MAX_CLIENTS:
            found = await self._closed(2 * clients, seconds)
            if found < MIN_GAIN * best:
                break
            clients, best = 2 * clients, found
        return clients, best

    async def at_rate(self, rate: float, until: asyncio.Event) -> Findings:
        """Poisson arrivals that wait for nobody, until the event."""
        found = Findings()
        async with asyncio.TaskGroup() as tasks:
            while not until.is_set():
                tasks.create_task(self._send(found))
                wait_s = self._random.expovariate(rate)
                try:
                    await asyncio.wait_for(until.wait(), wait_s)
                except TimeoutError:
                    continue
        return found

    async def _closed(self, clients: int, seconds: float) -> float:
        """Replies per second of clients that wait for their answers."""
        start_s, found = time.monotonic(), Findings()

        async def client() -> None:
            while time.monotonic() - start_s < seconds:
                await self._send(found)

        await asyncio.gather(*(client() for _ in range(clients)))
        return found.num_compared / (time.monotonic() - start_s)

    async def _send(self, found: Findings) -> None:
        number = self._random.randrange(len(self._calls))
        found.num_sent += 1
        reply = await send(self._client, self._calls[number])
        if reply.ending != "done":
            found.errors[f"{reply.status} {reply.error or reply.ending}"] += 1
            return
        found.num_compared += 1
        found.by_version[reply.version] += 1
        found.gaps += zip(reply.times_s[1:], reply.gaps_s, strict=True)
        solo = self._solo.get(reply.version)
        if solo is None or reply.said != solo[number]:
            found.different.append(self._calls[number])
