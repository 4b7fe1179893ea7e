"""The command line of `python -m bench.exactness`, and its report.

Prints a table, or JSON lines; exit code 1 if a case differs or its circumstance did not come about.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO

from bench.engine_flags import add_engine_flags, engine_fields
from bench.exactness import constraints
from bench.exactness.circumstance import Lab
from bench.exactness.probes import word_probes
from bench.exactness.restart import in_another_process
from bench.exactness.subject import Subject
from bench.exactness.suite import circumstances
from bench.exactness.tally import HEADER, Tally, row, tallies, total
from bench.machine import describe, read_clocks
from bench.results import Result, repeat
from bench.table import WIDTH, block, footer, header
from checkpoints.errors import CheckpointError
from jaxinfer import EngineConfig, JaxInferError
from jaxinfer.build import build
from jaxinfer.config import cache_folder, replace
from jaxinfer.server.flags import count  # so that flags read as serve.py's do

NUM_PROBES = 6


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    engine: dict[str, Any]  # fields of EngineConfig
    num_probes: int
    seed: int
    num_reps: int
    out: Path | None  # JSON lines are appended to it
    as_json: bool

    @property
    def config(self) -> EngineConfig:
        return replace(EngineConfig(), show_progress=False, **self.engine)


def parse(argv: Sequence[str]) -> Settings:
    """A bad command line ends the process with exit code 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__)
    add_engine_flags(parser)
    parser.add_argument(
        "--cases",
        type=count,
        default=NUM_PROBES,
        metavar="N",
        help=f"requests that are put into each circumstance that suits them ({NUM_PROBES})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of their prompts (0)")
    parser.add_argument("--reps", type=count, default=3, help="repetitions of the costs (3)")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append JSON lines to it")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument("--cache-dir", help="models and compiled programs")
    given = vars(parser.parse_args(argv))
    return Settings(
        engine=engine_fields(given, "cache_dir"),
        num_probes=given["cases"],
        seed=given["seed"],
        num_reps=given["reps"],
        out=given["out"],
        as_json=given["json"],
    )


class Report:
    """Writes lines of the table, or of JSON, as they come."""

    def __init__(self, settings: Settings, out: TextIO):
        self._settings, self._out = settings, out
        self._context = {**describe(), **settings.engine, "seed": settings.seed}

    def say(self, lines: Iterable[str]) -> None:
        """For people only."""
        if not self._settings.as_json:
            self._print(lines)

    def add(self, outcome: Tally | Result, rows: Iterable[str]) -> None:
        """Args: rows: what the table shows of it."""
        line = json.dumps(outcome.line(self._context))
        self._print([line] if self._settings.as_json else rows)
        if self._settings.out is not None:
            with self._settings.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def head(self) -> None:
        """What is measured on what, and the columns of the tallies."""
        self.say([*self._header()[:2], "", row("circumstance", HEADER)])

    def head_of_costs(self) -> None:
        self.say(["", *self._header()[2:]])

    def _header(self) -> list[str]:
        return list(header(self._context, self._settings.num_reps))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, file=self._out, flush=True)


def counted(settings: Settings, clock: Callable[[], float]) -> Iterator[Tally]:
    """Loads the model and runs every case."""
    config = settings.config
    built = build(config)
    probes = word_probes(built.tokenizer, settings.num_probes, built.plan.page_size, settings.seed)
    lab = Lab(Subject(built, restart=in_another_process(config)), probes)
    yield from tallies(lab, circumstances(lab.limits, probes), clock)


def costs(settings: Settings, report: Report) -> None:
    """Measures what the constraints cost, and says what was compared."""
    cache_dir = cache_folder(settings.config)
    model = constraints.load(settings.config.source.model, cache_dir)
    steps = constraints.DecodeSteps(model)
    inexact = constraints.inexact_rows(steps)  # compiles, too
    repetitions = repeat(
        lambda: constraints.time_rows(steps, time.monotonic), settings.num_reps, read_clocks
    )
    title = "a decode step without its least rows"
    result = Result.of("cost", title, repetitions, settings.num_reps)
    report.head_of_costs()
    report.add(result, block(result))
    report.say(footer([result]))
    for line in constraints.explain(model.decoder, inexact):
        report.say(wrap(line, WIDTH, subsequent_indent="    "))


def run(settings: Settings, found: Iterator[Tally], report: Report) -> int:
    """Returns: the exit code."""
    report.head()
    seen: list[Tally] = []
    for tally in found:
        seen.append(tally)
        report.add(tally, tally.rows())
    whole = total(seen)
    report.say(whole.rows())
    return int(whole.num_differences + whole.num_not_met > 0)


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    settings = parse(argv)
    report = Report(settings, sys.stdout)
    try:
        code = run(settings, counted(settings, time.monotonic), report)
        costs(settings, report)
    except (JaxInferError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code
