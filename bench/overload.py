"""`python -m bench.overload`: what a server does with several times the load that it can carry.

First what it can: requests of a fixed number of clients, one after the other each, and the first
token of an idle server. Then arrivals at random (Poisson), that do not wait for answers, at
multiples of that rate. The highest class is a fixed, small share of the capacity at every level;
the overload comes from the lower ones. Every request of these names its time limit.

The server is a process of its own, on the loopback address; client and server share the cores. Its
steps are kept short (LATENCY_FLAGS); other flags of serve.py may follow.
Prints a table; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import httpx

from bench.service.client import TIMEOUT_S, Call, Reply, send
from bench.service.mixture import COMPLETIONS
from bench.service.server import Server, ServerFailed, started
from bench.service.statistics import percentile
from jaxinfer import EngineConfig
from jaxinfer.server.flags import count, positive

RAMP = 0.25  # of a level's time, in which it comes to its state: counted apart
INTERACTIVE_SHARE = 0.1  # of the capacity, at every level
BATCH_SHARE = 0.5  # of all other arrivals
NUM_IDLE = 12  # requests of an idle server
MIN_GOODPUT, MAX_LATE, MAX_REFUSAL_S, MAX_TTFT = 0.95, 0.01, 0.010, 1.2
LATENCY_FLAGS = ("--max-num-batched-tokens", "128")  # short steps; flags given later win


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line says."""

    levels: tuple[float, ...]  # of the capacity
    seconds: float  # per level
    num_clients: int  # that measure the capacity
    prompt_words: int
    max_tokens: int
    timeout_s: float  # of a request; twice for batch
    seed: int

    def timeout_of(self, name: str) -> float:
        return self.timeout_s * {"interactive": 1.0, "normal": 1.0, "batch": 2.0}[name]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent, by whom, and what came back."""

    at_s: float  # since the level began
    name: str  # of its class
    timeout_s: float
    reply: Reply

    @property
    def is_good(self) -> bool:
        return self.reply.ending == "done" and self.reply.e2e_s <= self.timeout_s

    @property
    def is_admitted(self) -> bool:
        return self.reply.status != 429

    @property
    def end_s(self) -> float:
        return self.at_s + self.reply.e2e_s


@dataclass(frozen=True, slots=True)
class Level:
    """A load, and what became of it."""

    rate: float  # arrivals per second; 0: closed loop
    seconds: float
    sent: Sequence[Sent]

    @property
    def goodput(self) -> float:
        """Answers in time, per second."""
        start_s = self.seconds * RAMP
        good = sum(s.is_good and start_s <= s.end_s < self.seconds for s in self.sent)
        return good / (self.seconds - start_s)

    def first_tokens(self, name: str) -> list[float]:
        """Of the answers to a class; seconds."""
        start_s = self.seconds * RAMP
        found = (s for s in self.sent if s.name == name and s.at_s >= start_s)
        return [s.reply.ttft_s for s in found if s.reply.ttft_s is not None]

    def refusals(self) -> list[float]:
        """Seconds that each took."""
        return [s.reply.e2e_s for s in self.sent if not s.is_admitted]

    def late_share(self, *, in_ramp: bool = False) -> float:
        """Of the admitted: not answered by their deadline."""
        ramp_s = self.seconds * RAMP
        admitted = [s for s in self.sent if s.is_admitted and (s.at_s < ramp_s) == in_ramp]
        return sum(not s.is_good for s in admitted) / max(len(admitted), 1)


class Load:
    """Sends requests of the three classes to one server."""

    def __init__(self, plan: Plan, client: httpx.AsyncClient):
        self._plan, self._client = plan, client
        self._random = Random(plan.seed)
        self._num_sent = 0

    async def idle(self) -> list[float]:
        """First tokens of requests that come one by one; seconds."""
        replies = [await self._send("interactive", 0.0) for _ in range(NUM_IDLE)]
        return [r.reply.ttft_s for r in replies if r.reply.ttft_s is not None]

    async def closed(self) -> Level:
        """Clients that wait for an answer before they send the next."""
        start_s, sent = time.monotonic(), list[Sent]()

        async def client() -> None:
            while (at_s := time.monotonic() - start_s) < self._plan.seconds:
                sent.append(await self._send("normal", at_s, has_limit=False))

        await asyncio.gather(*(client() for _ in range(self._plan.num_clients)))
        return Level(0.0, self._plan.seconds, sent)

    async def open(self, rate: float, capacity: float) -> Level:
        """`rate` arrivals per second, of which the highest class has a share of the capacity."""
        interactive = INTERACTIVE_SHARE * capacity / rate
        start_s, at_s = time.monotonic(), 0.0
        tasks: list[asyncio.Task[Sent]] = []
        while (at_s := at_s + self._random.expovariate(rate)) < self._plan.seconds:
            await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
            draw = self._random.random()
            name = "batch" if draw < interactive + BATCH_SHARE * (1 - interactive) else "normal"
            name = "interactive" if draw < interactive else name
            tasks.append(asyncio.create_task(self._send(name, time.monotonic() - start_s)))
        return Level(rate, self._plan.seconds, await asyncio.gather(*tasks))

    async def _send(self, name: str, at_s: float, *, has_limit: bool = True) -> Sent:
        self._num_sent += 1
        words = [f"w{self._random.randrange(1000)}" for _ in range(self._plan.prompt_words)]
        timeout_s = self._plan.timeout_of(name)
        body: dict[str, Any] = {
            "prompt": f"{self._num_sent} " + " ".join(words),
            "max_tokens": self._plan.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "priority": name,
        }
        body |= {"timeout": timeout_s} if has_limit else {}
        return Sent(at_s, name, timeout_s, await send(self._client, Call(COMPLETIONS, body)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A level, and the metrics before and after it."""

    level: Level
    before: Mapping[str, float]
    after: Mapping[str, float]
    client_cores: float  # that this process took from the server

    @property
    def step_s(self) -> float:
        """Mean time between two tokens of an answer: a step under this load."""
        name = "inter_token_latency_seconds"
        total = self.after[f"{name}_sum"] - self.before[f"{name}_sum"]
        return total / max(self.after[f"{name}_count"] - self.before[f"{name}_count"], 1.0)


async def measure(plan: Plan, server: Server) -> tuple[list[float], list[Outcome]]:
    """First tokens of the idle server; the closed loop and then every level."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    options: dict[str, Any] = {"limits": limits, "timeout": TIMEOUT_S, "trust_env": False}
    async with httpx.AsyncClient(base_url=server.url, **options) as client:
        load = Load(plan, client)
        await load.idle()  # the first ones warm caches
        idle = await load.idle()
        outcomes = [await _around(server, load.closed)]
        capacity = outcomes[0].level.goodput
        if not capacity:
            raise ServerFailed("no request was answered in time; give them more (--timeout)")
        for times in plan.levels:
            opened = partial(load.open, times * capacity, capacity)
            outcomes.append(await _around(server, opened))
    return idle, outcomes


async def _around(server: Server, run: Callable[[], Any]) -> Outcome:
    before = await asyncio.to_thread(server.metrics)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    level: Level = await run()
    cores = (time.process_time() - start_cpu_s) / (time.monotonic() - start_s)
    return Outcome(level, before, await asyncio.to_thread(server.metrics), cores)


HEAD = (
    "load",
    "sent",
    "refused",
    "goodput/s",
    "of peak",
    "ramp late",
    "late",
    "refusal ms",
    "ttft ms",
    "bar ms",
)


def table(idle: Sequence[float], outcomes: Sequence[Outcome]) -> Iterator[tuple[str, bool]]:
    """Lines, and whether every bar is met in each."""
    capacity = outcomes[0].level.goodput
    peak = max(outcome.level.goodput for outcome in outcomes)
    idle_s = percentile(idle, 50)
    yield f"first token of an idle server: {idle_s * 1e3:.0f} ms, median of {len(idle)}", True
    yield f"capacity: {capacity:.2f} requests/s in a closed loop", True
    yield _row(HEAD), True
    for outcome in outcomes[1:]:
        level, bar_s = outcome.level, MAX_TTFT * idle_s + outcome.step_s
        refusals, first = level.refusals(), level.first_tokens("interactive")
        refusal_s, first_s = percentile(refusals, 50), percentile(first, 50)
        cells = (
            f"{level.rate / capacity:.0f}x",
            f"{len(level.sent)}",
            f"{len(refusals)}",
            f"{level.goodput:.2f}",
            f"{level.goodput / peak:.0%}",
            f"{level.late_share(in_ramp=True):.1%}",
            f"{level.late_share():.1%}",
            f"{refusal_s * 1e3:.1f}" if refusals else "-",
            f"{first_s * 1e3:.0f}",
            f"{bar_s * 1e3:.0f}",
        )
        is_over = level.rate > 1.5 * capacity
        yield (
            _row(cells),
            (
                (level.goodput >= MIN_GOODPUT * peak or not is_over)
                and level.late_share() <= MAX_LATE
                and not refusal_s > MAX_REFUSAL_S
                and first_s <= bar_s
            ),
        )
        yield f"    {_counts(level)}; client {outcome.client_cores:.2f} cores", True


def _counts(level: Level) -> str:
    """What became of each class."""
    found = Counter(
        (s.name, "in time" if s.is_good else s.reply.error or s.reply.ending) for s in level.sent
    )
    return ", ".join(f"{name} {end} {n}" for (name, end), n in sorted(found.items()))


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>10}" for cell in cells)


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--model", default=EngineConfig().source.model, help="as of serve.py")
    parser.add_argument("--levels", type=_levels, default=(1, 4, 10), help="(default: 1,4,10)")
    parser.add_argument("--seconds", type=positive, default=60.0, help="per level (default: 60)")
    parser.add_argument("--clients", type=count, default=32, help="for the capacity (default: 32)")
    parser.add_argument("--words", type=count, default=12, help="of a prompt (default: 12)")
    parser.add_argument("--max-tokens", type=count, default=16, help="of an answer (default: 16)")
    parser.add_argument("--timeout", type=positive, default=15.0, help="seconds (default: 15)")
    parser.add_argument("--seed", type=int, default=0)
    given, flags = parser.parse_known_args(argv)
    plan = Plan(
        levels=given.levels,
        seconds=given.seconds,
        num_clients=given.clients,
        prompt_words=given.words,
        max_tokens=given.max_tokens,
        timeout_s=given.timeout,
        seed=given.seed,
    )
    try:
        with started(given.model, [*LATENCY_FLAGS, *flags]) as server:
            lines = list(table(*asyncio.run(measure(plan, server))))
    except ServerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line, is_good in lines:
        print(f"{line}{'' if is_good else '  FAILED'}")
    return int(not all(is_good for _, is_good in lines))


def _levels(text: str) -> tuple[float, ...]:
    return tuple(positive(part) for part in text.split(","))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
