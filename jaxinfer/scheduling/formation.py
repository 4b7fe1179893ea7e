"""Sequences that decode together, step after step, as columns.

Host only: no JAX. While nobody comes, goes or waits for a page, a step differs from the one before
it in its positions only: no walk over objects is needed to build it. (Rows with penalties are the
exception: they take along what was drawn for them and read meanwhile.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxinfer.scheduling.batch import Batch, SamplingBatch
from jaxinfer.scheduling.penalties import taken_further
from jaxinfer.scheduling.running_table import RunningTable, Seats
from jaxinfer.scheduling.sequence import Sequence


class Formation:
    """The sequences of a decode step, which may go on in later ones.

    Args:
        sequences: in rising context length, as in the batch's rows.
        batch: the step that they were first scheduled in.
        page_size: tokens per page.
    """

    def __init__(
        self, sequences: list[Sequence], batch: Batch, table: RunningTable, page_size: int
    ):
        number = len(sequences)
        self.sequences = sequences
        self.num_new = [1] * number
        self._table, self._page_size = table, page_size
        self._num_moves, self._num_writes = table.num_moves, table.num_writes
        self._seats: Seats = np.fromiter([s.seat for s in sequences], np.intp, number)
        self._room = np.fromiter([len(s.page_table) for s in sequences], np.int32, number)
        self._room *= page_size
        is_real = np.arange(batch.bucket) < number
        self._step = is_real.astype(np.int32)  # [B]: what the next step adds to a position
        self._sampling_step = self._step[: len(batch.sampling.positions)]
        ends = np.fromiter([s.max_total_tokens for s in sequences], np.int32, number)
        self._num_left = int((ends - batch.positions[:number]).min()) - 2
        from_seat = np.full(batch.bucket, -1, np.int32)
        from_seat[:number] = self._seats
        self._batch = batch
        self._next = replace(batch, token_ids=np.zeros_like(batch.token_ids), from_seat=from_seat)

    @property
    def can_go_on(self) -> bool:
        """Whether the same sequences are there, and none has drawn its last token."""
        return self._num_left > 0 and self._num_moves == self._table.num_moves

    def without_room(self) -> list[Sequence]:
        """Those whose next token needs a page; ask again after pages were added."""
        needed = self._batch.positions[: len(self.sequences)] + 2
        return [self.sequences[row] for row in np.flatnonzero(needed > self._room)]

    def add_page(self, sequence: Sequence, page: int) -> None:
        self._table.add_pages(sequence, [page])
        self._room[self._seats == sequence.seat] += self._page_size

    def next_batch(self) -> Batch:
        """The step after the last one: each row's newest token, which the device has."""
        last = self._batch
        table = last.page_table
        if self._num_writes != self._table.num_writes:
            self._num_writes = self._table.num_writes
            table = self._table.gather(self._seats, len(table))
        self._num_left -= 1
        self._batch = replace(
            self._next,
            positions=last.positions + self._step,
            page_table=table,
            sampling=self._next_sampling(last.sampling),
        )
        return self._batch

    def _next_sampling(self, last: SamplingBatch) -> SamplingBatch:
        positions, penalties = last.positions + self._sampling_step, last.penalties
        if penalties is not None:
            penalties = taken_further(penalties, self.sequences, positions)
        return replace(last, positions=positions, penalties=penalties)
