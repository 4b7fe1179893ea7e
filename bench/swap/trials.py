"""Real canaries of a real model, good and bad: what becomes of each, and how soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from bench.service.client import Call, client_of, send
from bench.service.mixture import CHAT
from bench.service.server import Server
from bench.swap.made_versions import noise, one_scale, overflow, swapped, write_version
from bench.swap.operator import Operator, Refused

SHARE = 0.25
NEVER = 10**6
POLL_S = 0.5
NOISE = 0.03  # of the default model's weights: about +0.05 nats per token
SENTENCES = (
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "Write a short letter to a landlord about a broken heater in the kitchen.",
    "List three ways to save water at home and say which of them saves most.",
    "My train leaves at nine and the ride takes two hours; when do I arrive?",
    "Summarise in two sentences what a compiler does and why one is needed.",
    "Give me a recipe for bread that needs neither yeast nor an oven.",
    "Why do cats purr, and do they do so only when they are content?",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A kind of canary."""

    name: str
    is_bad: bool
    folder: Path


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of one."""

    trial: Trial
    phase: str  # of the rollout, at the end
    reason: str
    seconds: float  # from being loaded to the decision, or to the end of patience
    num_requests: int  # that the canary had answered by then


def made_trials(model: Path, folder: Path, num_layers: int) -> list[Trial]:
    """Writes a version of each kind, if it is not there."""
    makes: dict[str, tuple[bool, dict[str, Any]]] = {
        "the same weights, written anew": (False, {}),
        "finite weights, products that are not": (True, {"change": overflow}),
        "two layers swapped": (True, {"moved": swapped(num_layers // 3, 2 * num_layers // 3)}),
        "one product's scale doubled": (True, {"change": one_scale(num_layers * 2 // 5, 2.0)}),
        "noise, about +0.05 nats per token": (True, {"change": noise(NOISE, 1)}),
    }
    trials: list[Trial] = []
    for name, (is_bad, how) in makes.items():
        out = folder / name.replace(" ", "-").replace(",", "").replace("+", "").replace("'", "")
        if not out.exists():
            write_version(model, out, **how)
        trials.append(Trial(name, is_bad, out))
    return trials


async def run_trials(
    server: Server,
    trials: Sequence[Trial],
    *,
    rate: float,
    patience_s: float,
    fields: Mapping[str, Any],
) -> list[Ending]:
    """One after the other, under chats at `rate` per second."""
    async with client_of(server.url) as client:
        over = asyncio.Event()
        load = asyncio.create_task(_chats(client, rate, over))
        try:
            operator = Operator(client, fields)
            return [await _run(operator, trial, patience_s) for trial in trials]
        finally:
            over.set()
            await load


async def _run(operator: Operator, trial: Trial, patience_s: float) -> Ending:
    """Until it is rolled back, or patience ends; then it is rolled back and dropped."""
    schedule = [{"share": SHARE, "hold_s": NEVER, "min_requests": NEVER}]
    try:
        status = await operator.load(str(trial.folder), schedule=schedule, shadow_share=1.0)
    except Refused as refused:  # it did not pass what is asked before it gets a call
        return Ending(trial, "failed", str(refused), 0.0, 0)
    version, start_s, num_requests = status["rollout"]["version"], time.monotonic(), 0
    while status["rollout"]["phase"] == "canary" and time.monotonic() - start_s < patience_s:
        await asyncio.sleep(POLL_S)
        status = await operator.status()
        num_requests = max(num_requests, *(_requests_of(status, version)))
    seconds, rollout = time.monotonic() - start_s, status["rollout"]
    if rollout["phase"] == "canary":
        await operator.roll_back(version)
    while len((await operator.status())["versions"]) > 1:
        await asyncio.sleep(POLL_S)
    reason = rollout["reason"] if rollout["phase"] != "canary" else ""
    return Ending(trial, rollout["phase"], reason, seconds, num_requests)


def _requests_of(status: Mapping[str, Any], version: str) -> list[int]:
    return [0, *(card["requests"] for card in status["versions"] if card["version"] == version)]


async def _chats(client: httpx.AsyncClient, rate: float, over: asyncio.Event) -> None:
    random, number = Random(0), 0
    async with asyncio.TaskGroup() as tasks:
        while not over.is_set():
            number += 1
            text = f"{random.choice(SENTENCES)} {random.choice(SENTENCES)}"
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 32,
                "stream": True,
                "user": f"user {number}",
                "seed": number,
            }
            tasks.create_task(send(client, Call(CHAT, body)))
            await asyncio.sleep(random.expovariate(rate))


def report(endings: Sequence[Ending]) -> Iterator[tuple[str, bool]]:
    """A line for each canary, and whether it ended as it should."""
    for end in endings:
        is_rolled_back = end.phase in ("rolled_back", "failed")
        yield (
            f"{end.trial.name}: {end.phase} after {end.seconds:.0f} s and {end.num_requests} "
            f"requests{f': {end.reason}' if end.reason else ''}",
            is_rolled_back == end.trial.is_bad,
        )
