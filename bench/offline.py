"""`python -m bench.offline`: speed and memory of the engine in this process, without a server.

Through `LLM`, as a script would use it. Prints a table, or JSON lines; exit code 1 if
a measure failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.engine_flags import add_engine_flags, engine_fields
from bench.machine import describe, read_clocks
from bench.measures import Measures
from bench.results import Failure, Outcome
from bench.table import block, footer, header
from bench.workloads import WORKLOADS, Workload
from checkpoints.errors import CheckpointError
from jaxinfer import LLM, JaxInferError
from jaxinfer.server.flags import count  # so that flags read as serve.py's do


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    engine: dict[str, Any]  # fields of EngineConfig
    workloads: Mapping[str, Workload]
    num_reps: int
    out: Path | None  # JSON lines are appended to it
    as_json: bool

    @property
    def model(self) -> str:
        return self.engine["model"]


def parse(argv: Sequence[str]) -> Settings:
    """A bad command line ends the process with exit code 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench.offline", description=__doc__)
    add_engine_flags(parser)
    parser.add_argument(
        "--only",
        type=_chosen,
        default=WORKLOADS,
        metavar="NAMES",
        help=f"some of {','.join(WORKLOADS)}; memory and load are always measured",
    )
    parser.add_argument("--reps", type=count, default=3, help="repetitions (default: 3)")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append JSON lines to it")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    given = vars(parser.parse_args(argv))
    return Settings(
        engine=engine_fields(given),
        workloads=given["only"],
        num_reps=given["reps"],
        out=given["out"],
        as_json=given["json"],
    )


def _chosen(text: str) -> dict[str, Workload]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(
                f"expected some of {','.join(WORKLOADS)}; got {name!r}"
            )
    return {name: WORKLOADS[name] for name in names}


def report(settings: Settings, outcomes: Iterator[Outcome], out: TextIO) -> int:
    """Writes each outcome as it comes. Returns: the exit code."""
    context = {**describe(), **settings.engine}
    if not settings.as_json:
        _say(out, header(context, settings.num_reps))
    seen: list[Outcome] = []
    for outcome in outcomes:
        seen.append(outcome)
        line = json.dumps(outcome.line(context))
        _say(out, [line] if settings.as_json else block(outcome))
        if settings.out is not None:
            with settings.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    if not settings.as_json:
        _say(out, footer(seen))
    return int(any(isinstance(outcome, Failure) for outcome in seen))


def _say(out: TextIO, lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        print(line, file=out, flush=True)


def outcomes(settings: Settings) -> Iterator[Outcome]:
    """Loads the model, and takes each measure as it is asked for."""
    start = read_clocks()
    measures = Measures(
        LLM(**settings.engine),
        num_reps=settings.num_reps,
        clocks=read_clocks,
        clock=time.monotonic,
        start=start,
    )
    yield from measures.workloads(settings.workloads)
    yield measures.memory()
    yield measures.load(settings.engine)


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    settings = parse(argv)
    try:
        return report(settings, outcomes(settings), sys.stdout)
    except (JaxInferError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
