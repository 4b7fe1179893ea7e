"""Cases counted by circumstance, as lines of a table and of JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from bench.exactness.circumstance import Case, Circumstance, Lab
from bench.exactness.suite import cases

NAME_WIDTH, FIGURE_WIDTH = 44, 13
HEADER = ("cases", "differences", "not met", "wall s")


@dataclass(slots=True)
class Tally:
    """One line: all cases of a family of circumstances."""

    circumstance: str
    num_cases: int = 0
    num_differences: int = 0
    num_not_met: int = 0  # cases whose circumstance did not come about, so that nothing was seen
    wall_s: float = 0.0
    wrong: list[str] = field(default_factory=list[str])  # each in words

    def add(self, case: Case, wall_s: float) -> None:
        self.num_cases += 1
        self.wall_s += wall_s
        if case.wrong is not None:
            self.num_differences += case.is_proved
            self.num_not_met += not case.is_proved
            self.wrong.append(str(case))

    def line(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """For a JSON line."""
        return {"measure": "exactness", **asdict(self), **context}

    def rows(self) -> Iterator[str]:
        """Of the table: its figures, then what is wrong."""
        figures = (self.num_cases, self.num_differences, self.num_not_met, f"{self.wall_s:.1f}")
        yield row(self.circumstance, figures)
        for text in self.wrong:
            yield f"    {text}"


def row(name: str, figures: Sequence[object]) -> str:
    cells = "".join(f"{figure!s:>{FIGURE_WIDTH}}" for figure in figures)
    return f"{name:{NAME_WIDTH}}{cells}"


def tallies(
    lab: Lab, chosen: Sequence[Circumstance], clock: Callable[[], float]
) -> Iterator[Tally]:
    """Runs every case and gives each family's tally when it is complete. Raises nothing for a case
    that is wrong.
    """
    start = clock()
    for probe in lab.probes:
        lab.reference(probe)
    yield Tally("alone: the reference", wall_s=clock() - start)
    for family, members in groupby(chosen, lambda c: c.family or c.name):
        tally = Tally(family)
        for circumstance, probe in cases(list(members), lab.probes):
            start = clock()
            tally.add(lab.check(circumstance, probe), clock() - start)
        if tally.num_cases:
            yield tally


def total(counted: Sequence[Tally]) -> Tally:
    """Of all lines; without the words."""
    whole = Tally("all")
    for tally in counted:
        whole.num_cases += tally.num_cases
        whole.num_differences += tally.num_differences
        whole.num_not_met += tally.num_not_met
        whole.wall_s += tally.wall_s
    return whole
