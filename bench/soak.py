"""`python -m bench.soak`: thousands of requests on a server whose steps fail, whose clients leave.

Every kind of request is first answered alone by a server that nothing happens to. Then many clients
send them at once, some go away at a random moment, some send what must be refused, and a share of
the steps fails. Every reply that comes to its end must be the one from before, bit by bit; at the
end no page and no permit may be missing, and the memory must not rise.

The server is a process of its own, on the loopback address, with a tiny model unless one is named.
Prints a table; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import httpx

from bench.service.client import Call, Reply, client_of, send
from bench.service.faults import FaultRates
from bench.service.mixture import bad_call, good_calls
from bench.service.server import Server, ServerFailed, started
from bench.service.statistics import slope
from bench.tiny_model import write_checkpoint
from jaxinfer.server.flags import count

NUM_KINDS = 150
NUM_SAMPLES = 60  # of memory
SETTLED = 1 / 3  # of the run, before which memory is not looked at
MAX_SLOPE = 512.0  # bytes per request
LEAVE_S = 0.3  # a client that leaves does so within this
IDLE_S = 10.0  # for the last pages to come back
TINY_FLAGS = ("--page-size", "16", "--max-num-seqs", "16", "--max-num-batched-tokens", "128")
POOL = ("--kv-cache-memory", "320KiB")  # small, so that sequences are preempted


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line says."""

    num_requests: int
    num_clients: int
    leave_share: float
    bad_share: float
    rates: FaultRates
    seed: int


@dataclass(slots=True)
class Findings:
    """What happened."""

    seconds: float = 0.0
    endings: Counter[str] = field(default_factory=Counter[str])
    num_compared: int = 0
    different: list[Call] = field(default_factory=list[Call])
    not_refused: list[Call] = field(default_factory=list[Call])  # bad ones that got no 4xx
    errors: Counter[str] = field(default_factory=Counter[str])  # of good ones
    sent: list[int] = field(default_factory=list[int])  # requests when memory was looked at
    rss: list[float] = field(default_factory=list[float])  # bytes
    last: dict[str, float] = field(default_factory=dict[str, float])  # metrics, when all is over

    def bytes_per_request(self) -> float:
        """The slope of memory once it has settled."""
        start = int(len(self.sent) * SETTLED)
        return slope(self.sent[start:], self.rss[start:])


async def solo_replies(url: str, calls: Sequence[Call]) -> list[Reply]:
    """One after the other. Raises: ServerFailed if one is not answered."""
    replies: list[Reply] = []
    async with client_of(url, num_connections=1) as client:
        for call in calls:
            reply = await send(client, call)
            if reply.ending != "done":
                raise ServerFailed(f"{call} alone: {reply.status} {reply.error}")
            replies.append(reply)
    return replies


class Soak:
    """The clients, and what they find."""

    def __init__(self, plan: Plan, server: Server, calls: Sequence[Call], solo: Sequence[Reply]):
        self._plan, self._server = plan, server
        self._calls, self._solo = calls, solo
        self._random = Random(plan.seed)
        self._num_sent = 0
        self.findings = Findings()

    async def run(self) -> Findings:
        start_s = time.monotonic()
        async with client_of(self._server.url, num_connections=self._plan.num_clients) as client:
            clients = (self._send_on(client) for _ in range(self._plan.num_clients))
            await asyncio.gather(*clients)
            self.findings.seconds = time.monotonic() - start_s
            self.findings.last = await self._idle_metrics()
        return self.findings

    async def _send_on(self, client: httpx.AsyncClient) -> None:
        """One client, until all have been sent."""
        while self._num_sent < self._plan.num_requests:
            self._num_sent += 1
            if self._num_sent % max(1, self._plan.num_requests // NUM_SAMPLES) == 0:
                await self._look_at_memory()
            if self._random.random() < self._plan.bad_share:
                await self._send_bad(client)
            else:
                await self._send_good(client)

    async def _send_bad(self, client: httpx.AsyncClient) -> None:
        call = bad_call(self._random)
        reply = await send(client, call)
        self.findings.endings["bad"] += 1
        if reply.ending != "refused" or not 400 <= reply.status < 500 or reply.status == 429:
            self.findings.not_refused.append(call)

    async def _send_good(self, client: httpx.AsyncClient) -> None:
        number = self._random.randrange(len(self._calls))
        call = self._calls[number]
        if self._random.random() < self._plan.leave_share:
            call = replace(call, leaves_after_s=self._random.uniform(0, LEAVE_S))
        reply = await send(client, call)
        self.findings.endings[reply.ending] += 1
        if reply.ending == "done":
            self.findings.num_compared += 1
            if reply.said != self._solo[number].said:
                self.findings.different.append(call)
        elif reply.ending != "left":
            self.findings.errors[f"{reply.status} {reply.error}"] += 1

    async def _look_at_memory(self) -> None:
        metrics = await asyncio.to_thread(self._server.metrics)
        self.findings.sent.append(self._num_sent)
        self.findings.rss.append(metrics["process_resident_memory_bytes"])

    async def _idle_metrics(self) -> dict[str, float]:
        """When everything has come back, or after a while."""
        deadline = time.monotonic() + IDLE_S
        while True:
            metrics = await asyncio.to_thread(self._server.metrics)
            busy = [metrics[name] for name in LEFT_OVER.values()]
            if not any(busy) or time.monotonic() > deadline:
                return metrics
            await asyncio.sleep(0.2)


LEFT_OVER = {
    "pages in use": "kv_pages{used}",
    "sequences running": "num_requests_running",
    "sequences waiting": "num_requests_waiting",
    "requests open": "open_requests",
}


def report(plan: Plan, found: Findings) -> Iterator[tuple[str, bool]]:
    """Lines, and whether what each says is as it must be."""
    endings, last = found.endings, found.last
    yield (
        f"{plan.num_requests} requests of {plan.num_clients} clients in {found.seconds:.0f} s: "
        f"{endings['done']} answered, {endings['left']} clients left, {endings['bad']} bad",
        True,
    )
    yield (
        f"steps made to fail: retried choices {last['request_retries_total']:.0f}, pools made anew "
        f"{last['engine_rebuilds_total']:.0f}, preemptions {last['num_preemptions_total']:.0f}",
        last["request_retries_total"] > 0 or not plan.rates.at_collect,
    )
    yield (
        f"replies other than alone: {len(found.different)} of {found.num_compared}",
        (found.num_compared > 0 and not found.different),
    )
    yield f"good requests without an answer: {dict(found.errors) or 0}", not found.errors
    yield f"bad requests without a 4xx: {len(found.not_refused)}", not found.not_refused
    for what, name in LEFT_OVER.items():
        yield f"{what} at the end: {last[name]:.0f}", last[name] == 0
    yield (
        f"memory: {found.rss[0] / 2**20:.0f} MiB, at the end {found.rss[-1] / 2**20:.0f} MiB; "
        f"slope {found.bytes_per_request():,.0f} bytes per request (bar {MAX_SLOPE:.0f})",
        found.bytes_per_request() <= MAX_SLOPE,
    )


def soak(model: str, flags: Sequence[str], plan: Plan) -> Findings:
    """Raises: ServerFailed."""
    calls = good_calls(NUM_KINDS, plan.seed)
    with started(model, flags) as server:
        solo = asyncio.run(solo_replies(server.url, calls))
    with started(model, flags, rates=plan.rates) as server:
        return asyncio.run(Soak(plan, server, calls, solo).run())


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--model", help="path or catalog name (default: a random one, tiny)")
    parser.add_argument("--requests", type=count, default=20_000, help="(default: 20000)")
    parser.add_argument("--clients", type=count, default=32, help="(default: 32)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    rates = FaultRates(at_dispatch=0.005, at_collect=0.005, pool_lost=0.0002, seed=given.seed)
    plan = Plan(given.requests, given.clients, 0.3, 0.05, rates, given.seed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, flags = given.model, POOL
            if model is None:
                model = str(write_checkpoint(Path(folder) / "tiny"))
                flags = (*TINY_FLAGS, *POOL, "--cache-dir", str(Path(folder) / "cache"))
            lines = list(report(plan, soak(model, flags, plan)))
    except ServerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line, is_good in lines:
        print(f"{'ok    ' if is_good else 'FAILED'} {line}")
    return int(not all(is_good for _, is_good in lines))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
