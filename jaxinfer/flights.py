"""Steps that were dispatched and not read.

Host only: no JAX.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way."""

    scheduled: Scheduled
    pending: Any  # what the runner gave for it
    started_s: float
    error: Exception | None  # why it could not be dispatched
    lost: set[Sequence] = field(default_factory=set[Sequence])  # begun again since: not theirs


class Flights:
    """In the order of their dispatch."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def oldest(self) -> Flight:
        return self._flights[0]

    @property
    def oldest_has_failed(self) -> bool:
        """Whether there is one, and it could not be dispatched."""
        return bool(self._flights) and self._flights[0].error is not None

    @property
    def newest_has_failed(self) -> bool:
        return bool(self._flights) and self._flights[-1].error is not None

    @property
    def versions(self) -> set[str]:
        """Of the weights that they compute with."""
        return {flight.scheduled.batch.version for flight in self._flights}

    @property
    def sequences(self) -> list[Sequence]:
        """That are in them and have not begun again since, each once."""
        found = (s for f in self._flights for s in f.scheduled.sequences if s not in f.lost)
        return list(dict.fromkeys(found))

    def add(self, flight: Flight) -> None:
        """It was dispatched just now."""
        self._flights.append(flight)

    def pop(self) -> Flight:
        """The oldest, which has been read."""
        return self._flights.popleft()

    def lose(self, sequences: Iterable[Sequence]) -> None:
        """What they draw in steps under way is not theirs any more."""
        lost = list(sequences)
        for flight in self._flights:
            flight.lost.update(lost)

    def clear(self) -> None:
        """None of them will be read."""
        self._flights.clear()
