"""Repetitions of a measure, the quietest of them, and their statistics as one line.

Knows nothing of engines: a repetition is a function that returns figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.machine import Clocks, Span
from bench.workloads import Figures

QUIET = 0.1  # cores of other processes up to which a repetition counts
DISTURBED = 0.2  # cores of other processes above which a figure is no measurement
MAX_TIMES = 2  # of the wanted repetitions, to find quiet ones
MAX_SEARCH_S = 240.0  # after this no further repetition is begun for the sake of quiet


@dataclass(frozen=True, slots=True)
class Repetition:
    figures: Figures
    span: Span

    @property
    def others(self) -> float:
        """Cores that others used; what cannot be read counts as quiet."""
        return self.span.others or 0.0


@dataclass(frozen=True, slots=True)
class Statistic:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Statistic:
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])


@dataclass(frozen=True, slots=True)
class Result:
    """A measure: statistics over the repetitions that were kept."""

    measure: str
    title: str  # what was measured, for people
    metrics: dict[str, Statistic]
    wall_s: Statistic
    cpu_s: Statistic  # of this process and its children
    others: Statistic | None  # cores that other processes used; None: this system does not tell
    num_kept: int
    num_run: int

    @property
    def is_disturbed(self) -> bool:
        return self.others is not None and self.others.max > DISTURBED

    @classmethod
    def of(cls, measure: str, title: str, repetitions: list[Repetition], wanted: int) -> Result:
        """Of the `wanted` quietest repetitions."""
        kept = quietest(repetitions, wanted)
        spans = [repetition.span for repetition in kept]
        others = [span.others for span in spans if span.others is not None]
        return cls(
            measure,
            title,
            {
                name: Statistic.of(repetition.figures[name] for repetition in kept)
                for name in kept[0].figures
            },
            wall_s=Statistic.of(span.wall_s for span in spans),
            cpu_s=Statistic.of(span.cpu_s for span in spans),
            others=Statistic.of(others) if others else None,
            num_kept=len(kept),
            num_run=len(repetitions),
        )

    def line(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """For a JSON line: the metrics beside the rest, then what they depend on."""
        fields = asdict(self)
        metrics = fields.pop("metrics")
        return {
            "measure": fields.pop("measure"),
            **metrics,
            **fields,
            "is_disturbed": self.is_disturbed,
            **context,
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A measure that could not be taken."""

    measure: str
    title: str
    error: str

    def line(self, context: Mapping[str, Any]) -> dict[str, Any]:
        return {**asdict(self), **context}


Outcome = Result | Failure


def quietest(repetitions: list[Repetition], wanted: int) -> list[Repetition]:
    return sorted(repetitions, key=lambda repetition: repetition.others)[:wanted]


def repeat(once: Callable[[], Figures], wanted: int, clocks: Clocks) -> list[Repetition]:
    """Runs `once` until `wanted` repetitions were quiet, or it has been tried enough."""
    repetitions: list[Repetition] = []
    first = clocks()
    end = first
    while _goes_on(repetitions, wanted, Span.between(first, end).wall_s):
        start = clocks()
        figures = once()
        end = clocks()
        repetitions.append(Repetition(figures, Span.between(start, end)))
    return repetitions


def _goes_on(repetitions: list[Repetition], wanted: int, elapsed_s: float) -> bool:
    if len(repetitions) < wanted:
        return True
    num_quiet = sum(repetition.others <= QUIET for repetition in repetitions)
    has_room = len(repetitions) < MAX_TIMES * wanted and elapsed_s <= MAX_SEARCH_S
    return num_quiet < wanted and has_room
