"""`python -m bench.load URL`: chats that are streamed from a server, and how fast they came.

Clients that send the next request when the last one has ended (`--clients`), or arrivals at random
that wait for nobody (`--rate`). Figures are told apart by the weights version that answered, so a
canary shows beside the stable version. Any OpenAI-compatible server will do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from bench.service.client import Call, Reply, client_of, send
from bench.service.mixture import CHAT, WORDS
from bench.service.statistics import percentile
from jaxinfer.server.flags import count, positive

DEFAULT_URL = "http://127.0.0.1:8000"
TELL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line says."""

    seconds: float
    clients: int
    rate: float | None  # arrivals per second; None: as fast as the clients go
    words: int  # of a prompt
    max_tokens: int
    users: int  # of which each chat names one
    model: str | None
    seed: int


@dataclass(slots=True)
class Replies:
    """All that came back, by the version that answered."""

    by_version: dict[str, list[Reply]] = field(default_factory=dict[str, list[Reply]])

    def add(self, reply: Reply) -> None:
        self.by_version.setdefault(reply.version, []).append(reply)

    @property
    def num_done(self) -> int:
        return sum(r.ending == "done" for some in self.by_version.values() for r in some)


class Load:
    """Sends chats to one server."""

    def __init__(self, plan: Plan, client: httpx.AsyncClient):
        self.replies = Replies()
        self._plan, self._client = plan, client
        self._random = Random(plan.seed)

    async def run(self) -> float:
        """Returns: seconds until the last reply."""
        start_s = time.monotonic()
        telling = asyncio.create_task(self._tell(start_s))
        try:
            await (self._closed(start_s) if self._plan.rate is None else self._open(start_s))
        finally:
            telling.cancel()
        return time.monotonic() - start_s

    async def _closed(self, start_s: float) -> None:
        async def client() -> None:
            while time.monotonic() - start_s < self._plan.seconds:
                await self._send()

        await asyncio.gather(*(client() for _ in range(self._plan.clients)))

    async def _open(self, start_s: float) -> None:
        assert self._plan.rate is not None
        at_s = self._random.expovariate(self._plan.rate)
        async with asyncio.TaskGroup() as tasks:
            while at_s < self._plan.seconds:
                await asyncio.sleep(max(start_s + at_s - time.monotonic(), 0.0))
                tasks.create_task(self._send())
                at_s += self._random.expovariate(self._plan.rate)

    async def _send(self) -> None:
        random, plan = self._random, self._plan
        text = " ".join(random.choices(WORDS, k=plan.words))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": plan.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": f"user-{random.randrange(plan.users)}",
        }
        if plan.model is not None:
            body["model"] = plan.model
        self.replies.add(await send(self._client, Call(CHAT, body)))

    async def _tell(self, start_s: float) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            shares = {v or "?": len(some) for v, some in self.replies.by_version.items()}
            print(f"{time.monotonic() - start_s:5.0f} s: replies {shares}", file=sys.stderr)


def table(replies: Replies, seconds: float) -> Iterator[str]:
    """One line for each version; times in milliseconds."""
    yield (
        f"{'version':20}{'replies':>9}{'bad':>6}{'tokens/s':>10}"
        f"{'first p50':>11}{'p99':>8}{'gap p50':>9}{'p99':>8}"
    )
    for version, some in sorted(replies.by_version.items()):
        firsts = [1e3 * r.ttft_s for r in some if r.ttft_s is not None]
        gaps = [1e3 * gap for r in some for gap in r.gaps_s]
        tokens = sum(r.num_tokens for r in some) / seconds
        yield (
            f"{version or '(not told)':20}{len(some):>9}{sum(r.ending != 'done' for r in some):>6}"
            f"{tokens:>10.1f}{percentile(firsts, 50):>11.0f}{percentile(firsts, 99):>8.0f}"
            f"{percentile(gaps, 50):>9.1f}{percentile(gaps, 99):>8.1f}"
        )
    bad = Counter(
        f"{r.status} {r.error}" for some in replies.by_version.values() for r in some if r.error
    )
    for what, number in bad.most_common():
        yield f"{number} x {what}"


def main(argv: Sequence[str]) -> int:
    """Returns: 0, or 1 if no reply came as it should."""
    args = _parser().parse_args(argv)
    plan = Plan(
        seconds=args.seconds,
        clients=args.clients,
        rate=args.rate,
        words=args.words,
        max_tokens=args.max_tokens,
        users=args.users,
        model=args.model,
        seed=args.seed,
    )
    headers = {} if args.api_key is None else {"authorization": f"Bearer {args.api_key}"}
    replies, seconds = asyncio.run(_run(plan, args.url, headers))
    print("\n".join(table(replies, seconds)))
    return 0 if replies.num_done else 1


async def _run(plan: Plan, url: str, headers: dict[str, str]) -> tuple[Replies, float]:
    async with client_of(url, headers=headers) as client:
        load = Load(plan, client)
        return load.replies, await load.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("url", nargs="?", default=DEFAULT_URL)
    parser.add_argument("--seconds", type=positive, default=60.0)
    parser.add_argument("--clients", type=count, default=8)
    parser.add_argument("--rate", type=positive, help="arrivals per second, instead of clients")
    parser.add_argument("--words", type=count, default=40, help="of a prompt")
    parser.add_argument("--max-tokens", type=count, default=48)
    parser.add_argument("--users", type=count, default=200)
    parser.add_argument("--model", help="a name that the server knows")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
