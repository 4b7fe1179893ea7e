"""The sequences that run, best rank first.

Host only: no JAX. Keeps what hangs together when one starts or stops: the order, its seat at the
running table, and the counts of its weights version and its class.
"""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from jaxinfer.scheduling.rank import Rank
from jaxinfer.scheduling.running_table import RunningTable, Seats
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.version_turns import VersionTurns

_by_rank = attrgetter("rank")


def by_class(sequence: Sequence) -> tuple[int, Rank]:
    """Whose is largest gives way first: the lowest class, and in it the worst rank."""
    return (sequence.request.priority, sequence.rank)


class Running:
    """At most as many as `table` has seats."""

    def __init__(self, table: RunningTable, turns: VersionTurns):
        self._table, self._turns = table, turns
        self._sequences: list[Sequence] = []
        self._num_of_class: Counter[int] = Counter()  # no zeros
        self._seats: Seats | None = None  # in the same order; None: ask the sequences again

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def lowest_class(self) -> int:
        """The largest priority of those that run, far below all others without any."""
        return max(self._num_of_class, default=-sys.maxsize)

    def worse(self, sequence: Sequence) -> list[Sequence]:
        """Those of a worse rank than this one, whether it runs or not."""
        return self._sequences[bisect_right(self._sequences, sequence.rank, key=_by_rank) :]

    def giving_way_to(self, sequence: Sequence) -> Sequence | None:
        """Who gives way first to a running one, if that is in need of pages."""
        if len(self._num_of_class) == 1:
            last = self._sequences[-1]
            return None if last is sequence else last
        return max(self.worse(sequence), key=by_class, default=None)

    def far(self) -> list[Sequence]:
        """Those that are behind by more than one token, best rank first."""
        seats = self._all_seats()
        return self._table.sequences(seats[self._table.is_far[seats]])

    def has_drawn(self, sequence: Sequence) -> bool:
        """Whether it has got a token, or will by the steps under way, since it sat down."""
        return bool(self._table.has_drawn[sequence.seat])

    def start(self, sequence: Sequence, num_computed: int) -> None:
        """Runs a sequence that has its pages, `num_computed` tokens of which are in KV."""
        sequence.status = Status.RUNNING
        self._turns.start(sequence.version)
        self._table.sit(sequence, num_computed)
        insort(self._sequences, sequence, key=_by_rank)
        self._num_of_class[sequence.request.priority] += 1
        self._seats = None

    def stop(self, sequence: Sequence) -> list[int]:
        """Returns: the pages that it gives back. It awaits a token if one is on its way."""
        self._sequences.remove(sequence)
        self._seats = None
        self._turns.stop(sequence.version)
        priority = sequence.request.priority
        self._num_of_class[priority] -= 1
        if not self._num_of_class[priority]:
            del self._num_of_class[priority]
        sequence.is_awaited = sequence.num_scheduled_tokens >= len(sequence.token_ids)
        self._table.stand(sequence)
        return sequence.forget_pages()

    def seats(self, version: str) -> Seats:
        """Of those that this version computes."""
        seats = self._all_seats()
        if self._turns.is_mixed:
            return seats[[sequence.version == version for sequence in self._sequences]]
        return seats if version in self._turns.num_running else seats[:0]

    def _all_seats(self) -> Seats:
        if self._seats is None:
            seats = [sequence.seat for sequence in self._sequences]
            self._seats = np.array(seats, np.intp)
        return self._seats

    def check_integrity(self) -> None:
        """Raises: AssertionError if order, seats, counters and page tables disagree."""
        table, sequences = self._table, self._sequences
        assert sequences == sorted(sequences, key=_by_rank)
        assert len({sequence.seat for sequence in sequences}) == len(sequences)
        assert table.num_taken == len(sequences), f"{table.num_taken} seats are taken"
        assert self._turns.num_running == Counter(s.version for s in sequences)
        assert self._num_of_class == Counter(s.request.priority for s in sequences)
        seats = [self.seats(version).tolist() for version in self._turns.num_running]
        assert sorted(s for some in seats for s in some) == sorted(s.seat for s in sequences)
        for sequence in sequences:
            assert sequence.status is Status.RUNNING
            table.check_seat(sequence)
