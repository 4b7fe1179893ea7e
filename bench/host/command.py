"""The command line of `python -m bench.host`.

Schedule, update and detokenize with many sequences running and many more waiting, once while the
same ones go on and once while answers end and prompts start all the time; and the digests that find
a cached prefix. Prints a table, or JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.host.costs import HostWorld, StepCosts, digest_s_per_token, percentiles
from bench.machine import describe
from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.resolve import resolve
from jaxinfer.config import ModelSource
from jaxinfer.errors import JaxInferError
from jaxinfer.server.flags import count
from jaxinfer.tokenizer import Tokenizer

OUTPUT_TOKENS = {"steady": (3000, 3001), "churn": (64, 512)}
TITLES = {
    "steady": "decode steps, nobody comes or goes",
    "churn": "answers of 64 to 511 tokens: some end, some start",
}
PARTS = ("schedule_s", "update_s", "detokenize_s", "all_s")
BARS = {"all_s": 200e-6, "digest": 50e-9}  # p99 of a step; a token
DIGEST_TOKENS, DIGEST_REPS = 64 * 500, 20


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A bad command line ends the process with exit code 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--model", default=ModelSource().model, help="whose tokenizer is used")
    parser.add_argument("--running", type=count, default=256, help="sequences (default: 256)")
    parser.add_argument("--waiting", type=count, default=10_000, help="(default: 10000)")
    parser.add_argument("--steps", type=count, default=1000, help="of each measure (default: 1000)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    return parser.parse_args(argv)


def results(settings: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Each measure as it is taken; seconds."""
    for name, num_output in OUTPUT_TOKENS.items():
        world = HostWorld(
            tokenizer,
            num_running=settings.running,
            num_waiting=settings.waiting,
            num_output=num_output,
            clock=time.thread_time,
        )
        costs = world.steps(settings.steps)
        yield {"measure": name, **_parts(costs), **_shares(costs)}
    digests = [digest_s_per_token(DIGEST_TOKENS, time.thread_time) for _ in range(DIGEST_REPS)]
    yield {"measure": "digest", "digest_s_per_token": percentiles(digests)}


def _parts(costs: list[StepCosts]) -> dict[str, Any]:
    return {part: percentiles(getattr(cost, part) for cost in costs) for part in PARTS}


def _shares(costs: list[StepCosts]) -> dict[str, Any]:
    kinds = [kind for cost in costs for kind in cost.kinds]
    return {
        "num_steps": len(costs),
        "prefill_share": kinds.count("prefill") / max(1, len(kinds)),
        "rows_per_step": sum(cost.num_rows for cost in costs) / len(costs),
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """Microseconds per step, nanoseconds per token."""
    name = result["measure"]
    if name == "digest":
        yield _row("digest", "of pages, per token, ns", result["digest_s_per_token"], 1e9)
        return
    yield f"{name:9}{TITLES[name]}; {result['rows_per_step']:.0f} rows, " + (
        f"{result['prefill_share']:.0%} of the steps with chunks"
    )
    for part in PARTS:
        label = "whole step" if part == "all_s" else part.removesuffix("_s")
        yield _row("", f"{label}, us", result[part], 1e6)


def _row(name: str, label: str, figures: dict[str, float], factor: float) -> str:
    cells = "".join(f"{value * factor:10,.1f}" for value in figures.values())
    return f"{name:9}{label:30}{cells}"


def _tokenizer(model: str) -> Tokenizer:
    checkpoint = open_checkpoint(resolve(model))
    try:
        return Tokenizer(
            checkpoint.tokenizer,
            chat_template=None,
            bos_token=checkpoint.bos_token,
            eos_token=checkpoint.eos_token,
            add_bos=checkpoint.add_bos,
            eos_token_ids=checkpoint.eos_token_ids,
        )
    finally:
        checkpoint.close()


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    settings = parse(argv)
    try:
        tokenizer = _tokenizer(settings.model)
    except (JaxInferError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    context = {**describe(), "num_running": settings.running, "num_waiting": settings.waiting}
    if not settings.json:
        print(f"{settings.running} running, {settings.waiting} waiting; CPU time of the thread")
        print(f"bars: p99 of a whole step {BARS['all_s'] * 1e6:.0f} us, a token's digest 50 ns\n")
        print(f"{'':39}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for result in results(settings, tokenizer):
        lines = [json.dumps({**result, **context})] if settings.json else table(result)
        for line in lines:
            print(line, flush=True)
    return 0
