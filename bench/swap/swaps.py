"""Many swaps between two versions of a model, under load."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from bench.service.client import Call, client_of
from bench.service.mixture import good_calls
from bench.service.server import Server, ServerFailed, started
from bench.service.statistics import percentile
from bench.soak import solo_replies
from bench.swap.operator import KEY, Operator
from bench.swap.traffic import Findings, Said, Traffic, Window

NUM_KINDS = 60  # of requests
LOAD = 0.8  # of the capacity
CANARY_EVERY = 4  # one swap in so many goes by a canary
CANARY_SHARE, CANARY_S = 0.5, 0.5
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is swapped, and how."""

    models: tuple[str, str]  # paths
    flags: Sequence[str]  # of serve.py
    fields: Mapping[str, Any]  # of every order
    num_swaps: int
    knee_s: float  # for each number of clients
    quiet_s: float  # of load without swaps
    seed: int


@dataclass(slots=True)
class Windows:
    """When what was done, one after the other."""

    loading: list[Window] = field(default_factory=list[Window])  # from the order to a canary
    swapping: list[Window] = field(default_factory=list[Window])  # from promote to the end of drop


@dataclass(slots=True)
class Result:
    """What was seen."""

    clients: int
    rate: float  # requests per second
    quiet: Findings
    swapped: Findings
    windows: Windows
    seconds: float  # that the swaps took
    step_s: float  # mean time between two tokens, while quiet
    before: Mapping[str, float]  # metrics
    after: Mapping[str, float]


def swap(plan: Plan) -> Result:
    """Raises: ServerFailed, Refused."""
    calls = good_calls(NUM_KINDS, plan.seed)
    solo = dict(_solo(model, plan, calls) for model in plan.models)
    if len(solo) < len(plan.models):
        raise ServerFailed("both models have the same version; name two that differ")
    with _server(plan.models[0], plan) as server:
        return asyncio.run(_measure(plan, server, calls, solo))


def _server(model: str, plan: Plan) -> Any:
    return started(model, [*plan.flags, "--admin-key", KEY])


def _solo(model: str, plan: Plan, calls: Sequence[Call]) -> tuple[str, list[Said]]:
    """The version of a server of its own, and what it says."""
    with _server(model, plan) as server:
        replies = asyncio.run(solo_replies(server.url, calls))
    return replies[0].version, [reply.said for reply in replies]


async def _measure(
    plan: Plan, server: Server, calls: Sequence[Call], solo: Mapping[str, Sequence[Said]]
) -> Result:
    async with client_of(server.url) as client:
        traffic = Traffic(client, calls, solo, plan.seed)
        clients, capacity = await traffic.capacity(plan.knee_s)
        rate = LOAD * capacity
        before = await asyncio.to_thread(server.metrics)
        quiet = await _quiet(traffic, rate, plan.quiet_s)
        between = await asyncio.to_thread(server.metrics)
        start_s = time.monotonic()
        swapped, windows = await _swapped(plan, traffic, rate, Operator(client, plan.fields))
        seconds = time.monotonic() - start_s
        await asyncio.sleep(SETTLE_S)
        after = await asyncio.to_thread(server.metrics)
    step_s = _step_s(before, between)
    return Result(clients, rate, quiet, swapped, windows, seconds, step_s, before, after)


async def _quiet(traffic: Traffic, rate: float, seconds: float) -> Findings:
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    return await traffic.at_rate(rate, over)


async def _swapped(
    plan: Plan, traffic: Traffic, rate: float, operator: Operator
) -> tuple[Findings, Windows]:
    over, windows = asyncio.Event(), Windows()
    load = asyncio.create_task(traffic.at_rate(rate, over))
    try:
        stable = (await operator.status())["stable"]
        for i in tqdm(range(plan.num_swaps), desc="swaps", disable=None):
            stable = await _swap_once(operator, plan.models[(i + 1) % 2], stable, i, windows)
    finally:
        over.set()
    return await load, windows


async def _swap_once(
    operator: Operator, model: str, stable: str, number: int, windows: Windows
) -> str:
    """Loads the other one, makes it stable, drops the one before. Returns: the version."""
    start_s = time.monotonic()
    has_canary = number % CANARY_EVERY == CANARY_EVERY - 1
    status = await operator.load(model, share=CANARY_SHARE if has_canary else 0.0)
    version = status["rollout"]["version"]
    windows.loading.append((start_s, time.monotonic()))
    await asyncio.sleep(CANARY_S if has_canary else 0.0)
    start_s = time.monotonic()
    await operator.promote(version)
    await operator.drop(stable)
    windows.swapping.append((start_s, time.monotonic()))
    return version


def _step_s(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    name = "inter_token_latency_seconds"
    total = after[f"{name}_sum"] - before[f"{name}_sum"]
    return total / max(after[f"{name}_count"] - before[f"{name}_count"], 1.0)


def report(plan: Plan, found: Result) -> Iterator[tuple[str, bool]]:
    """Lines, and whether what each says is as it must be."""
    swapped, quiet = found.swapped, found.quiet
    yield (
        f"{plan.num_swaps} swaps in {found.seconds:.0f} s at {found.rate:.1f} requests/s, "
        f"{LOAD:.0%} of the capacity ({found.clients} clients)",
        True,
    )
    yield (
        f"requests that failed: {sum(swapped.errors.values())} of {swapped.num_sent} "
        f"{dict(swapped.errors) or ''}",
        not swapped.errors and swapped.num_sent > 0,
    )
    both = len(swapped.by_version) == len(plan.models)
    yield (
        f"replies equal to no version's solo run: {len(swapped.different)} of "
        f"{swapped.num_compared}, by {dict(swapped.by_version)}",
        not swapped.different and both,
    )
    compiled = sum(
        found.after[name] - found.before[name]
        for name in ("compile_events_total{serving}", "compile_events_total{version}")
    )
    yield f"compilations: {compiled:.0f}", not compiled
    always = [(-math.inf, math.inf)]
    calm = quiet.gaps_in(always)
    swapping = swapped.gaps_in(found.windows.swapping)
    for what, gaps in (
        ("without swaps", calm),
        ("from promote to the end of drop", swapping),
        ("while a version loads", swapped.gaps_in(found.windows.loading)),
    ):
        yield f"gap between tokens {what}: {_gaps(gaps)}", True
    allowed = percentile(calm, 99) + found.step_s
    yield (
        f"p99 of them while swapping: {percentile(swapping, 99) * 1e3:.1f} ms, the usual and a "
        f"step: {allowed * 1e3:.1f}",
        percentile(swapping, 99) <= allowed,
    )
    weights = [metrics["memory_bytes{weights}"] for metrics in (found.before, found.after)]
    yield (
        f"bytes of weights: {weights[0]:,.0f} before, {weights[1]:,.0f} after",
        weights[0] == weights[1],
    )
    rss = [
        metrics["process_resident_memory_bytes"] / 2**20 for metrics in (found.before, found.after)
    ]
    yield f"resident memory: {rss[0]:,.0f} MiB before, {rss[1]:,.0f} MiB after", True


def _gaps(gaps_s: Sequence[float]) -> str:
    shown = [f"p{p} {percentile(gaps_s, p) * 1e3:.1f}" for p in (50, 99)]
    return f"{', '.join(shown)}, max {max(gaps_s, default=0) * 1e3:.0f} ms ({len(gaps_s)})"
