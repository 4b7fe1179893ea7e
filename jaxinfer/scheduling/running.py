"""The sequences that run, best rank first.

Host only: no JAX. Keeps what hangs together when one starts or stops: the order, its seat at the
running table, and the count of its weights version.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from jaxinfer.scheduling.running_table import RunningTable, Seats
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.version_turns import VersionTurns

_by_rank = attrgetter("rank")


class Running:
    """At most as many as `table` has seats."""

    def __init__(self, table: RunningTable, turns: VersionTurns):
        self._table, self._turns = table, turns
        self._sequences: list[Sequence] = []
        self._seats: Seats | None = None  # in the same order; None: ask the sequences again

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def worst(self) -> Sequence:
        """The one that gives way first."""
        return self._sequences[-1]

    def start(self, sequence: Sequence, num_computed: int) -> None:
        """Runs a sequence that has its pages, `num_computed` tokens of which are in KV."""
        sequence.status = Status.RUNNING
        self._turns.start(sequence.version)
        self._table.sit(sequence, num_computed)
        insort(self._sequences, sequence, key=_by_rank)
        self._seats = None

    def stop(self, sequence: Sequence) -> list[int]:
        """Returns: the pages that it gives back. It awaits a token if one is on its way."""
        self._sequences.remove(sequence)
        self._seats = None
        self._turns.stop(sequence.version)
        sequence.is_awaited = sequence.num_scheduled_tokens >= len(sequence.token_ids)
        self._table.stand(sequence)
        return sequence.forget_pages()

    def seats(self, version: str) -> Seats:
        """Of those that this version computes."""
        if self._seats is None:
            seats = [sequence.seat for sequence in self._sequences]
            self._seats = np.array(seats, np.intp)
        if self._turns.is_mixed:
            return self._seats[[sequence.version == version for sequence in self._sequences]]
        return self._seats if version in self._turns.num_running else self._seats[:0]

    def check_integrity(self) -> None:
        """Raises: AssertionError if order, seats, counters and page tables disagree."""
        table, sequences = self._table, self._sequences
        assert sequences == sorted(sequences, key=_by_rank)
        assert len({sequence.seat for sequence in sequences}) == len(sequences)
        assert table.num_taken == len(sequences), f"{table.num_taken} seats are taken"
        assert self._turns.num_running == Counter(s.version for s in sequences)
        seats = [self.seats(version).tolist() for version in self._turns.num_running]
        assert sorted(s for some in seats for s in some) == sorted(s.seat for s in sequences)
        for sequence in sequences:
            assert sequence.status is Status.RUNNING
            table.check_seat(sequence)
