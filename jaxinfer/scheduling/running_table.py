"""What a batch needs of every running sequence, as numpy columns, one line ("seat") per sequence.

Host only: no JAX. A sequence sits down when it starts to run and stands up when it ends or is
preempted. What never changes in between (how it samples) and what changes rarely (its page table)
is written once; a batch is gathered from the columns instead of walking over objects.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from jaxinfer.scheduling.batch import Float32, Int32, SamplerVariant, UInt32
from jaxinfer.scheduling.sequence import Sequence

Seats = npt.NDArray[np.intp]

VARIANTS: tuple[SamplerVariant, ...] = get_args(SamplerVariant)


class RunningTable:
    """Columns of `num_seats` lines."""

    page_table: Int32  # [seats, M]; unused entries are 0
    temperature: Float32  # [seats]; 0: greedy
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seeds: UInt32  # [seats, 2]: low half, high half
    variant: Int32  # index into VARIANTS: the least that the sequence needs

    def __init__(self, num_seats: int, max_pages_per_seq: int):
        self.page_table = np.zeros((num_seats, max_pages_per_seq), np.int32)
        self.temperature = np.zeros(num_seats, np.float32)
        self.top_k = np.zeros(num_seats, np.int32)
        self.top_p = np.ones(num_seats, np.float32)
        self.min_p = np.zeros(num_seats, np.float32)
        self.seeds = np.zeros((num_seats, 2), np.uint32)
        self.variant = np.zeros(num_seats, np.int32)
        self.num_moves = 0  # sequences that sat down or stood up, since start
        self.num_writes = 0  # changes of the page table, since start
        self._free = list(range(num_seats - 1, -1, -1))

    def sit(self, sequence: Sequence) -> None:
        """Gives the sequence a seat and copies its page table and how it samples."""
        seat = self._free.pop()
        self.num_moves += 1
        self.num_writes += 1
        sequence.seat = seat
        sequence.is_newest_in_seat = False
        self.page_table[seat, : len(sequence.page_table)] = sequence.page_table
        sampling = sequence.request.sampling
        draws = not sampling.is_greedy
        self.temperature[seat] = sampling.temperature if draws else 0.0
        self.top_k[seat] = min(sampling.top_k, 2**31 - 1) if draws else 0
        self.top_p[seat] = sampling.top_p if draws else 1.0
        self.min_p[seat] = sampling.min_p if draws else 0.0
        self.seeds[seat] = (sequence.seed & 0xFFFFFFFF, sequence.seed >> 32)
        self.variant[seat] = VARIANTS.index(needed_variant(sequence))

    def stand(self, sequence: Sequence) -> None:
        """Takes the seat back; call it before the sequence's page table is taken away."""
        self.num_moves += 1
        self.num_writes += 1
        self.page_table[sequence.seat, : len(sequence.page_table)] = 0
        self._free.append(sequence.seat)
        sequence.seat = -1

    def add_pages(self, sequence: Sequence, pages: list[int]) -> None:
        """Appends pages to the page table of a sequence that sits here."""
        self.num_writes += 1
        start = len(sequence.page_table)
        sequence.page_table.extend(pages)
        self.page_table[sequence.seat, start : start + len(pages)] = pages

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


def needed_variant(sequence: Sequence) -> SamplerVariant:
    """The least sampler that does what the request asks for."""
    sampling = sequence.request.sampling
    if sampling.has_penalties or sampling.logit_bias:
        return "penalized"
    if sampling.logprobs:
        return "full"
    if sampling.is_greedy:
        return "greedy"
    if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        return "full"
    return "plain"
