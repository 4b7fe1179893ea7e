"""What a step needs of every running sequence, as numpy columns, one line ("seat") per sequence.

Host only: no JAX. A sequence sits down when it starts to run and stands up when it ends or is
preempted. Its counters live here, so that a step of hundreds of rows is put together and noted by a
few array operations instead of a walk over objects; what never changes while it sits (how it
samples) is written once.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from jaxinfer.scheduling.batch import Float32, Int32, SamplerVariant, UInt32
from jaxinfer.scheduling.sequence import Sequence

Seats = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

VARIANTS: tuple[SamplerVariant, ...] = get_args(SamplerVariant)


class RunningTable:
    """Columns of `num_seats` lines."""

    num_scheduled: Int32  # [seats]; tokens in KV when the steps under way have ended
    num_computed: Int32  # [seats]; tokens in KV, by steps that have been read
    room: Int32  # [seats]; tokens that its pages hold
    max_total: Int32  # [seats]; prompt and output end here
    is_far: Flags  # [seats]; behind by more than one token
    has_drawn: Flags  # [seats]; its newest token was drawn here, and the device has it
    has_grammar: Flags  # [seats]; what it may draw depends on the token before
    sitting: npt.NDArray[np.int64]  # [seats]; another number each time somebody sits down; 0: free
    page_table: Int32  # [seats, M]; unused entries are 0
    temperature: Float32  # [seats]; 0: greedy
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seeds: UInt32  # [seats, 2]: low half, high half
    variant: Int32  # index into VARIANTS: the least that the sequence needs

    def __init__(self, num_seats: int, max_pages_per_seq: int, page_size: int):
        self.num_scheduled = np.zeros(num_seats, np.int32)
        self.num_computed = np.zeros(num_seats, np.int32)
        self.room = np.zeros(num_seats, np.int32)
        self.max_total = np.zeros(num_seats, np.int32)
        self.is_far = np.zeros(num_seats, np.bool_)
        self.has_drawn = np.zeros(num_seats, np.bool_)
        self.has_grammar = np.zeros(num_seats, np.bool_)
        self.sitting = np.zeros(num_seats, np.int64)
        self.page_table = np.zeros((num_seats, max_pages_per_seq), np.int32)
        self.temperature = np.zeros(num_seats, np.float32)
        self.top_k = np.zeros(num_seats, np.int32)
        self.top_p = np.ones(num_seats, np.float32)
        self.min_p = np.zeros(num_seats, np.float32)
        self.seeds = np.zeros((num_seats, 2), np.uint32)
        self.variant = np.zeros(num_seats, np.int32)
        self.num_sat = 0  # since start
        self.num_writes = 0  # changes of page tables, since start
        self._page_size = page_size
        self._sequences: list[Sequence | None] = [None] * num_seats
        self._free = list(range(num_seats - 1, -1, -1))

    def sit(self, sequence: Sequence, num_computed: int) -> None:
        """Gives a seat to a sequence with its pages, which hold its first `num_computed` tokens."""
        seat = self._free.pop()
        self.num_sat += 1
        self.num_writes += 1
        sequence.table, sequence.seat = self, seat
        self._sequences[seat] = sequence
        self.sitting[seat] = self.num_sat
        self.num_scheduled[seat] = self.num_computed[seat] = num_computed
        self.is_far[seat] = len(sequence.token_ids) - num_computed > 1
        self.has_drawn[seat] = False
        self.has_grammar[seat] = sequence.constraint is not None
        self.max_total[seat] = sequence.max_total_tokens
        self.room[seat] = len(sequence.page_table) * self._page_size
        self.page_table[seat, : len(sequence.page_table)] = sequence.page_table
        self._write_sampling(sequence)

    def _write_sampling(self, sequence: Sequence) -> None:
        seat, sampling = sequence.seat, sequence.request.sampling
        draws = not sampling.is_greedy
        self.temperature[seat] = sampling.temperature if draws else 0.0
        self.top_k[seat] = min(sampling.top_k, 2**31 - 1) if draws else 0
        self.top_p[seat] = sampling.top_p if draws else 1.0
        self.min_p[seat] = sampling.min_p if draws else 0.0
        self.seeds[seat] = (sequence.seed & 0xFFFFFFFF, sequence.seed >> 32)
        self.variant[seat] = VARIANTS.index(needed_variant(sequence))

    def stand(self, sequence: Sequence) -> None:
        """Takes the seat back; call it before the sequence's page table is taken away."""
        seat = sequence.seat
        self.num_writes += 1
        self.page_table[seat, : len(sequence.page_table)] = 0
        self.sitting[seat] = 0
        self._sequences[seat] = None
        self._free.append(seat)
        sequence.table, sequence.seat = None, -1

    def sequences(self, seats: Seats) -> list[Sequence]:
        """Who sits there; all these seats are taken."""
        everybody = self._sequences
        return [everybody[seat] for seat in seats.tolist()]  # type: ignore[misc]

    def add_pages(self, sequence: Sequence, pages: list[int]) -> None:
        """Appends pages to the page table of a sequence that sits here."""
        if not pages:
            return
        self.num_writes += 1
        start, seat = len(sequence.page_table), sequence.seat
        sequence.page_table.extend(pages)
        self.page_table[seat, start : start + len(pages)] = pages
        self.room[seat] += len(pages) * self._page_size

    def must_be_read(self, seats: Seats | int) -> Flags | np.bool_:
        """Whether a token is on its way that must be known before the next is drawn."""
        is_under_way = self.num_scheduled[seats] > self.num_computed[seats]
        return self.has_grammar[seats] & self.has_drawn[seats] & is_under_way

    def gather(self, seats: Seats, num_rows: int) -> Int32:
        """[num_rows, M]: the page tables of these seats; rows beyond them are 0."""
        table = np.zeros((num_rows, self.page_table.shape[1]), np.int32)
        np.take(self.page_table, seats, axis=0, out=table[: len(seats)])
        return table

    def copy_pages(self, sequence: Sequence, places: list[int]) -> None:
        """Copies entries of the sequence's page table that have changed."""
        self.num_writes += len(places)
        for place in places:
            self.page_table[sequence.seat, place] = sequence.page_table[place]

    @property
    def num_taken(self) -> int:
        """Seats that somebody has."""
        return len(self._sequences) - len(self._free)

    def check_seat(self, sequence: Sequence) -> None:
        """Raises: AssertionError if the line of a sequence that sits here is not its own."""
        seat, num_pages = sequence.seat, len(sequence.page_table)
        assert self._sequences[seat] is sequence
        line = self.page_table[seat].tolist()
        assert line[:num_pages] == sequence.page_table, f"page table of seat {seat}"
        assert not any(line[num_pages:]), f"seat {seat} has entries past its pages"
        assert self.room[seat] == num_pages * self._page_size, f"room of seat {seat}"
        assert self.is_far[seat] == (sequence.num_behind > 1), f"seat {seat} is far or not"
        assert self.num_computed[seat] <= self.num_scheduled[seat] <= self.room[seat]


def needed_variant(sequence: Sequence) -> SamplerVariant:
    """The least sampler that does what the request asks for."""
    sampling = sequence.request.sampling
    if sampling.has_penalties or sampling.logit_bias or sequence.constraint is not None:
        return "penalized"
    if sampling.logprobs:
        return "full"
    if sampling.is_greedy:
        return "greedy"
    if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        return "full"
    return "plain"
