"""The sequences that wait to start or to resume, in two orders at once.

Host only: no JAX. By rank: nobody is passed over for ever. By turn, which is (size, rank): a prompt
does not wait for one that takes much longer than itself. A size is one step of doubling:

    tokens to compute     1 .. T/2    .. T    .. 2 T    .. 4 T        T: the token budget of a step
    size                      0         1        2         3
"""

from __future__ import annotations

from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.sequence_heap import SequenceHeap


class Waiting:
    """Each of its operations is O(log n), and looks at nobody else.

    Args:
        max_tokens: the token budget of a step.
    """

    def __init__(self, pool: PagePool, max_tokens: int):
        self._pool = pool
        self._short = max(1, max_tokens // 2)
        self._by_rank, self._by_turn = SequenceHeap(), SequenceHeap()

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._by_rank

    @property
    def best(self) -> Sequence | None:
        """The best rank."""
        item = self._by_rank.peek()
        return None if item is None else item[1]

    @property
    def next(self) -> Sequence | None:
        """The first in turn."""
        item = self._by_turn.peek()
        return None if item is None else item[1]

    def enter(self, sequence: Sequence) -> None:
        """Adds one that is new, or that was preempted just now; its turn is as of now."""
        self.set_turn(sequence)
        self.push(sequence)

    def set_turn(self, sequence: Sequence) -> None:
        """Its turn is as of now."""
        sequence.turn = (self._size(sequence), sequence.rank)

    def push(self, sequence: Sequence) -> None:
        """Adds one that has its turn."""
        self._by_rank.push(sequence.rank, sequence)
        self._by_turn.push(sequence.turn, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out if it is in it."""
        self._by_rank.remove(sequence)
        self._by_turn.remove(sequence)

    def _size(self, sequence: Sequence) -> int:
        """By what it has to compute: all, but for the prefix that a new one finds at once.

        (The pages that a preempted one has given back are the next to be evicted.)
        """
        number = sequence.num_tokens
        if number > self._short and sequence.status is Status.WAITING:
            number -= len(self._pool.match(sequence)) * self._pool.page_size
        return ((number - 1) // self._short).bit_length()
