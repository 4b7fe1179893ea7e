"""Sequences in the order of a key, with cheap removal from the middle.

Host only: no JAX. What is removed stays in the heap, dead, until it comes up or the dead outnumber
the living.
"""

from __future__ import annotations

import heapq
from typing import Any

from jaxinfer.scheduling.sequence import Sequence

_MIN_SWEEP = 64


class SequenceHeap:
    """Smallest key first. Push and pop O(log n), remove O(1), amortized."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Sequence]] = []
        self._ticket_of: dict[Sequence, int] = {}
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self._ticket_of)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._ticket_of

    def push(self, key: Any, sequence: Sequence) -> None:
        """Adds a sequence that is not in it; equal keys keep the order of the pushes."""
        assert sequence not in self._ticket_of
        self._num_tickets += 1
        self._ticket_of[sequence] = self._num_tickets
        heapq.heappush(self._heap, (key, self._num_tickets, sequence))

    def peek(self) -> tuple[Any, Sequence] | None:
        """Key and sequence that come first."""
        while self._heap:
            key, ticket, sequence = self._heap[0]
            if self._ticket_of.get(sequence) == ticket:
                return key, sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out if it is in it."""
        if self._ticket_of.pop(sequence, None) is None:
            return
        if len(self._heap) > 2 * len(self._ticket_of) + _MIN_SWEEP:
            self._heap = [item for item in self._heap if self._ticket_of.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
