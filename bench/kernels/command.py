"""The command line of `python -m bench.kernels`.

On a GPU: every kernel timed against what its bytes and operations take at least, and against other
forms of the same. Elsewhere: these floors for two cards, and nothing is timed. `--check`: whether
the kernels are right, which also runs interpreted (`--backend interpret --small`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import jax

from bench.kernels import suite, table
from bench.kernels.case import Case
from bench.kernels.checking import Checked, check
from bench.kernels.costs import A100, H200
from bench.kernels.sizes import SEVEN_B, SMALL, Sizes
from bench.kernels.timing import launch_s, measure_card, time_form, time_torch
from bench.machine import describe
from bench.pattern import pattern
from jaxinfer.server.flags import count
from pallas_kernels.backend import Backend, Form, resolve_backend


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A bad command line ends the process with exit code 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument(
        "--cases", type=pattern, default=pattern(""), metavar="REGEX", help="some; as printed"
    )
    parser.add_argument("--repeat", type=count, default=20, help="repetitions (default: 20)")
    parser.add_argument("--check", action="store_true", help="numbers and bits instead of times")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--backend", choices=("auto", *get_args(Form)), default="auto")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code; 1 if a check or a form of ours failed."""
    given = parse(argv)
    device = jax.devices()[0]
    try:
        backend = resolve_backend(
            given.backend,
            platform=device.platform,
            compute_capability=getattr(device, "compute_capability", None),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sizes = SMALL if given.small else SEVEN_B
    context = {**describe(), "backend": backend.form, "gpu": backend.gpu}
    as_json = given.format == "json"
    if not as_json:
        _say(table.machine_lines(context))
    if given.check:
        return _check(sizes, backend, given.cases, context, as_json=as_json)
    cases = list(suite.cases(sizes, given.cases))
    if backend.form != "pallas":
        return _floors(cases, context, as_json=as_json)
    return _times(cases, backend, given.repeat, context, as_json=as_json)


def _check(
    sizes: Sizes,
    backend: Backend,
    chosen: re.Pattern[str],
    context: Mapping[str, Any],
    *,
    as_json: bool,
) -> int:
    checked: list[Checked] = []
    for subject in suite.checks(sizes, backend, chosen):
        checked.append(check(subject, sizes.checked))
        if as_json:
            one = checked[-1]
            _say_json(
                check=one.name,
                relative_error=one.relative_error,
                bound=one.bound,
                num_sizes=one.num_sizes,
                differing=one.differing,
                is_good=one.is_good,
                **context,
            )
    if not as_json:
        _say(table.check_lines(checked))
    return int(not all(one.is_good for one in checked))


def _floors(cases: Sequence[Case], context: Mapping[str, Any], *, as_json: bool) -> int:
    cards = (H200, A100)
    if not as_json:
        _say(table.floor_lines(cases, cards))
        return 0
    for case in cases:
        floors = {card.name: card.floor_s(case.cost) * 1e6 for card in cards}
        _say_json(**_work(case), floor_us=floors, time_us=None, **context)
    return 0


def _times(
    cases: Sequence[Case],
    backend: Backend,
    repeat: int,
    context: Mapping[str, Any],
    *,
    as_json: bool,
) -> int:
    card, launch = measure_card(str(context["device"]), repeat), launch_s(repeat)
    if not as_json:
        _say(table.timed_header(card, launch))
    is_bad = False
    for case in cases:
        times = dict(_forms(case, backend, repeat))
        is_bad |= times["exact"] is None
        if as_json:
            _say_json(
                **_work(case),
                floor_us={card.name: card.floor_s(case.cost) * 1e6},
                time_us={form: None if s is None else s * 1e6 for form, s in times.items()},
                launch_us=launch * 1e6,
                **context,
            )
        else:
            _say([table.timed_line(case, card, times)])
    if not as_json:
        _say([table.LEGEND])
    return int(is_bad)


def _forms(case: Case, backend: Backend, repeat: int) -> Iterator[tuple[str, float | None]]:
    """Seconds by form; None for one that failed, whose error goes to stderr."""
    torch = _torch()
    for name, form in case.forms(backend).items():
        yield name, _tried(f"{case.name}, {name}", lambda form=form: time_form(case, form, repeat))
    if torch is not None and case.torch is not None:
        yield "torch", _tried(f"{case.name}, torch", lambda: time_torch(torch, case, repeat))


def _tried(name: str, measure: Any) -> float | None:
    try:
        return measure()
    except Exception as error:  # of a compiler, of an allocator, of another library
        print(f"{name}: {error}", file=sys.stderr)
        return None


def _torch() -> Any:
    """The module, where it is installed and has a GPU."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _work(case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "num_bytes": case.cost.num_bytes,
        "num_ops": case.cost.num_ops,
        "kind": case.cost.kind,
    }


def _say(lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _say_json(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)
