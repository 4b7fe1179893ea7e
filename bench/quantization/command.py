"""The command line of `python -m bench.quantization`.

Formats of one model side by side: as it is, rounded while it is loaded, with an int8 KV cache, and
checkpoints made of it. Quality against the original over held-out text; tokens/s at 1, 8 and 32
streams and of a prompt. Prints a Markdown table, or JSON lines; exit code 1 if a measure failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.engine_flags import add_engine_flags, engine_fields
from bench.machine import describe
from bench.quantization.rows import SPEEDS, Row, Table
from bench.quantization.variants import Variant, variants_of
from bench.workloads import WORKLOADS, Workload
from checkpoints.errors import CheckpointError
from jaxinfer import JaxInferError
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.server.flags import count

HEAD = (
    "format",
    "bits per weight",
    "KL",
    "perplexity (95 %)",
    "change (95 %)",
    "agreement",
    "1 stream",
    "8",
    "32",
    "prefill",
    "weights, MiB",
)
OF_VARIANTS = ("model", "quantization", "kv_cache_dtype")  # each variant has its own


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    engine: dict[str, Any]  # fields of EngineConfig, for all
    variants: Sequence[Variant]
    measuring: Measuring
    workloads: Mapping[str, Workload]
    num_reps: int
    out: Path | None  # JSON lines are appended to it
    as_json: bool


def parse(argv: Sequence[str]) -> Settings:
    """A bad command line ends the process with exit code 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantization", description=__doc__)
    add_engine_flags(parser)
    add = parser.add_argument
    add(
        "--also", type=_named, action="append", default=[], metavar="NAME=PATH", help="a checkpoint"
    )
    add("--only", metavar="NAMES", help="formats by their names in the table; the first is always")
    add("--held-out", type=Path, metavar="FILE.jsonl", help="texts to measure on (built-in ones)")
    add("--least-tokens", type=count, default=Measuring().least_tokens, metavar="N")
    add("--no-speed", action="store_true", help="quality only")
    add("--reps", type=count, default=3, help="repetitions (default: 3)")
    add("--out", type=Path, metavar="FILE.jsonl", help="append JSON lines to it")
    add("--json", action="store_true", help="print JSON lines instead of a table")
    given = vars(parser.parse_args(argv))
    engine = {k: v for k, v in engine_fields(given).items() if k not in OF_VARIANTS}
    return Settings(
        engine={**engine, "show_progress": False},
        variants=_chosen(parser, variants_of(given["model"], dict(given["also"])), given["only"]),
        measuring=Measuring(given["held_out"], given["least_tokens"], show_progress=False),
        workloads={} if given["no_speed"] else {name: WORKLOADS[name] for name in SPEEDS},
        num_reps=given["reps"],
        out=given["out"],
        as_json=given["json"],
    )


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=PATH; got {text!r}")
    return name, path


def _chosen(
    parser: argparse.ArgumentParser, variants: Sequence[Variant], names: str | None
) -> Sequence[Variant]:
    if names is None:
        return variants
    wanted = [name.strip() for name in names.split(";")]
    known = {variant.name for variant in variants}
    for name in wanted:
        if name not in known:
            parser.error(f"--only: expected some of {'; '.join(sorted(known))}; got {name!r}")
    return [one for i, one in enumerate(variants) if i == 0 or one.name in wanted]


def cells(row: Row) -> list[str]:
    """Of a line of the table."""
    p, change = row.perplexity, row.perplexity_change
    speeds = (
        f"{row.tokens_per_s[name]:,.0f}" if name in row.tokens_per_s else "-" for name in SPEEDS
    )
    return [
        row.name if row.name == row.format else f"{row.name} ({row.format})",
        f"{row.bits_per_weight:.2f}",
        f"{row.kl:.4f}",
        f"{p.value:.2f} ({p.low:.2f} to {p.high:.2f})",
        f"{100 * change.value:+.2f} % ({100 * change.low:+.2f} to {100 * change.high:+.2f})",
        f"{100 * row.agreement:.2f} %",
        *speeds,
        f"{row.weights_bytes / 2**20:,.0f}" if row.weights_bytes else "-",
    ]


def report(settings: Settings, rows: Iterable[Row], out: TextIO) -> int:
    """Writes each row as it comes. Returns: the exit code."""
    context = {**describe(), **settings.engine, "model": settings.variants[0].model}
    if not settings.as_json:
        for line in _header(context):
            print(line, file=out, flush=True)
    has_failed = False
    for row in rows:
        line = json.dumps(row.line(context))
        shown = line if settings.as_json else _line(cells(row))
        print(shown, file=out, flush=True)
        if settings.out is not None:
            with settings.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        for name, error in row.failures.items():
            has_failed = True
            print(f"{row.name}: {name} failed: {error}", file=sys.stderr)
    return int(has_failed)


def _header(context: Mapping[str, Any]) -> Iterator[str]:
    yield f"{context['model']}; jaxinfer {context['jaxinfer']}, JAX {context['jax']}, " + (
        f"{context['cores']} cores of {context['cpu']}; tokens/s"
    )
    yield ""
    yield _line(HEAD)
    yield _line(["---"] * len(HEAD))


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    settings = parse(argv)
    table = Table(
        settings.engine, settings.measuring, settings.workloads, num_reps=settings.num_reps
    )
    try:
        return report(settings, table.rows(settings.variants), sys.stdout)
    except (JaxInferError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
