"""`python -m bench.swap`: new versions of a model under load, good ones and bad ones.

swaps: a server swaps between two versions while requests of every kind come at 80 % of what it can
carry. Every reply must be, bit by bit, that of one version alone.
trials: canaries of the default model, made bad in known ways, until they are rolled back.
simulated: the same kinds by the thousand, through the rollout's state machine only.

The servers are processes of their own, on the loopback address. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from bench.service.server import ServerFailed, started
from bench.swap import swaps, trials
from bench.swap.made_versions import noise, write_version
from bench.swap.operator import KEY, Refused
from bench.swap.simulation import Findings, simulate_all, table
from bench.tiny_model import write_checkpoint
from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.resolve import resolve
from jaxinfer import EngineConfig
from jaxinfer.server.flags import count, positive

Lines = Iterator[tuple[str, bool]]
PARTS = ("swaps", "trials", "simulated")
TINY_FLAGS = (
    *("--page-size", "16", "--max-num-seqs", "16", "--max-num-batched-tokens", "128"),
    *("--kv-cache-memory", "4MiB"),
)
REAL_FLAGS = ("--quantization", "int8", "--max-kl", "inf", "--kv-cache-memory", "512MiB")
REAL_FIELDS = {"quantization": "int8"}
DIFFERENCE = 0.02  # noise, of the other version of a real model


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    given = _parser().parse_args(argv)
    parts = {"swaps": _swaps, "trials": _trials, "simulated": _simulated}
    is_good = True
    try:
        for name in given.parts:
            print(f"\n{name}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                for line, is_met in parts[name](given, Path(folder)):
                    print(f"{'ok    ' if is_met else 'FAILED'} {line}", flush=True)
                    is_good = is_good and is_met
    except (ServerFailed, Refused, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(not is_good)


def _swaps(given: argparse.Namespace, folder: Path) -> Lines:
    models, flags, fields = _pair(given.model, folder)
    log = ("--rollout-log", str(folder / "rollouts.jsonl"))
    plan = swaps.Plan(
        models=models,
        flags=(*flags, *log),
        fields=fields,
        num_swaps=given.swaps,
        knee_s=given.knee_s,
        quiet_s=given.quiet_s,
        seed=given.seed,
    )
    yield from swaps.report(plan, swaps.swap(plan))


def _pair(model: str | None, folder: Path) -> tuple[tuple[str, str], Sequence[str], dict[str, str]]:
    """Two versions, flags that serve both, and what an order says."""
    if model is None:
        tiny = tuple(str(write_checkpoint(folder / f"tiny-{i}", seed=i)) for i in range(2))
        cache = ("--cache-dir", str(folder / "cache"))
        return (tiny[0], tiny[1]), (*TINY_FLAGS, *cache), {}
    path = resolve(model)
    other = write_version(path, folder / "other", noise(DIFFERENCE, 1))
    return (str(path), str(other)), REAL_FLAGS, REAL_FIELDS


def _trials(given: argparse.Namespace, folder: Path) -> Lines:
    path = resolve(given.model or EngineConfig().source.model)
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    kinds = trials.made_trials(path, folder, checkpoint.config["num_hidden_layers"])
    log = ("--rollout-log", str(folder / "rollouts.jsonl"))
    with started(str(path), [*REAL_FLAGS, *log, "--admin-key", KEY]) as server:
        endings = asyncio.run(
            trials.run_trials(
                server, kinds, rate=given.rate, patience_s=given.patience_s, fields=REAL_FIELDS
            )
        )
    yield from trials.report(endings)


def _simulated(given: argparse.Namespace, folder: Path) -> Lines:
    findings: list[Findings] = []
    for one in tqdm(simulate_all(given.canaries, seed=given.seed), desc="kinds", disable=None):
        findings.append(one)
    for line in table(findings):
        yield line, True
    broken = [one.name for one in findings if not one.is_as_promised]
    yield (
        f"kinds of canaries that did not end as promised: {', '.join(broken) or 'none'}",
        not broken,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.swap", description=__doc__)
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", help="path or catalog name (of swaps: a tiny one)")
    parser.add_argument("--swaps", type=count, default=1000, help="(default: 1000)")
    parser.add_argument("--canaries", type=count, default=1000, help="of a kind (default: 1000)")
    parser.add_argument("--rate", type=positive, default=2.0, help="chats/s in trials (default: 2)")
    parser.add_argument("--patience-s", type=positive, default=180.0, help="of a trial")
    parser.add_argument("--knee-s", type=positive, default=3.0, help="for each number of clients")
    parser.add_argument("--quiet-s", type=positive, default=20.0, help="of load without swaps")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _parts(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PARTS)}; got {text!r}")
    return found
