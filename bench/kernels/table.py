"""Cases and checks as plain text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.kernels.case import Case
from bench.kernels.checking import Checked
from bench.kernels.costs import Card

NAME_WIDTH, FIGURE_WIDTH = 36, 9
FORMS = ("exact", "fast", "XLA", "JAX", "torch")  # what times are shown of, in this order

LEGEND = """
us: one launch: wall time of programs that make one for each of many copies of the operands, called
back to back. floor: max(bytes / measured bandwidth, operations / measured rate of a bf16 product;
int8 operations are taken to be twice as fast). %: what the floor is of exact.
exact: a row's bits are its own. fast: they may depend on the other rows. XLA: the same in jnp.
JAX: jax.experimental.pallas.ops.gpu.paged_attention (deprecated). torch: launched one by one."""


def machine_lines(context: Mapping[str, Any]) -> Iterator[str]:
    """What a figure depends on."""
    yield f"jaxinfer {context['jaxinfer']}, JAX {context['jax']}, Python {context['python']}"
    yield f"device {context['device']}; {context['cores']} cores of {context['cpu']}"


def floor_lines(cases: Sequence[Case], cards: Sequence[Card]) -> Iterator[str]:
    """The least time of each case on each card."""
    yield "Nothing was timed: no GPU is here, or the kernels' backend is not pallas. Floors, us:"
    for card in cards:
        yield f"  {card_line(card)}"
    yield ""
    yield _row("", ("MB", "Gop", *(card.name for card in cards)))
    for case in cases:
        yield _row(case.name, (*_work(case), *(_us(card.floor_s(case.cost)) for card in cards)))


def card_line(card: Card) -> str:
    return (
        f"{card.name}: {card.bytes_per_s / 1e12:.2f} TB/s, "
        f"{card.bf16_ops_per_s / 1e12:,.0f} bf16 and {card.int8_ops_per_s / 1e12:,.0f} int8 Top/s"
    )


def timed_header(card: Card, launch_s: float) -> Iterator[str]:
    yield f"measured: {card_line(card)}; a launch {_us(launch_s)} us"
    yield ""
    yield _row("us", ("floor", "exact", "%", *FORMS[1:]))


def timed_line(case: Case, card: Card, times_s: Mapping[str, float | None]) -> str:
    """Args: times_s: seconds by form; None for one that failed."""
    floor, exact = card.floor_s(case.cost), times_s["exact"]
    shown = {form: "failed" if time is None else _us(time) for form, time in times_s.items()}
    share = "-" if exact is None else f"{floor / exact:.0%}"
    others = (shown.get(form, "-") for form in FORMS[1:])
    return _row(case.name, (_us(floor), shown["exact"], share, *others))


def check_lines(checked: Sequence[Checked]) -> Iterator[str]:
    yield _row("", ("error", "bound", "sizes", "differ"))
    for one in checked:
        figures = (f"{one.relative_error:.1e}", f"{one.bound:.1e}", f"{one.num_sizes}")
        verdict = "" if one.is_good else "  BAD"
        yield _row(one.name, (*figures, f"{len(one.differing)}")) + verdict
    yield ""
    yield "error: the largest, by the largest number, against float64. differ: numbers of rows at"
    yield "which a row's bits are others than among all rows."


def _work(case: Case) -> tuple[str, str]:
    return f"{case.cost.num_bytes / 1e6:,.2f}", f"{case.cost.num_ops / 1e9:,.2f}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _row(name: str, figures: Sequence[str]) -> str:
    cells = "".join(f"{figure:>{FIGURE_WIDTH}}" for figure in figures)
    return f"{name:{NAME_WIDTH}}{cells}".rstrip()
