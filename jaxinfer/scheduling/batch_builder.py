"""Scheduled sequences -> the padded numpy arrays of one step.

Host only: no JAX. No array is written again once a batch holds it: a device may still read it.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Any

import numpy as np

from jaxinfer.scheduling.batch import AttentionBlocks, Batch, Int32, SamplingBatch
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.penalties import penalties_of
from jaxinfer.scheduling.running_table import VARIANTS, RunningTable, Seats
from jaxinfer.scheduling.sequence import Sequence

_by_context = attrgetter("num_scheduled_tokens")


class BatchBuilder:
    """Builds the batches of sequences that sit in `table`."""

    def __init__(self, buckets: Buckets, table: RunningTable):
        self._buckets = buckets
        self._table = table

    def decode(self, sequences: list[Sequence]) -> tuple[list[Sequence], Batch]:
        """One token each, all behind by one. Returns them in the batch's order: rising context."""
        ordered = sorted(sequences, key=_by_context)
        num_rows = len(ordered)
        bucket = self._buckets.rows_for(num_rows)
        seats, at = _seats(ordered), _num_scheduled(ordered)
        places = np.arange(num_rows, dtype=np.int32)
        token_ids, from_seat = _newest(ordered)
        batch = Batch(
            kind="decode",
            bucket=bucket,
            version=ordered[0].version,
            token_ids=_padded(token_ids, bucket, 0),
            from_seat=_padded(from_seat, bucket, -1),
            positions=_padded(at, bucket, -1),
            rows=_padded(places, bucket, 0),
            page_table=self._table.gather(seats, bucket),
            blocks=None,
            sample_at=_padded(places, self._buckets.max_rows, 0),
            sampling=self._sampling(ordered, seats, at + 1),
            num_seqs=num_rows,
            num_tokens=num_rows,
            num_sampled=num_rows,
        )
        return ordered, batch

    def prefill(self, sequences: list[Sequence], num_new: list[int]) -> tuple[list[int], Batch]:
        """`num_new[i]` tokens of sequence i. Returns also the places of those that are sampled."""
        num_seqs = len(sequences)
        lengths = np.fromiter(num_new, np.int32, num_seqs)
        starts = _num_scheduled(sequences)
        totals = np.fromiter([s.num_tokens for s in sequences], np.int32, num_seqs)
        seats = _seats(sequences)
        ends = np.cumsum(lengths, dtype=np.int32)
        firsts = ends - lengths
        num_tokens = int(ends[-1])
        bucket = self._buckets.tokens_for(num_tokens)
        rows = np.repeat(np.arange(num_seqs, dtype=np.int32), lengths)
        positions = np.arange(num_tokens, dtype=np.int32) + (starts - firsts)[rows]
        sampled = np.flatnonzero(starts + lengths == totals)
        drawing = [sequences[place] for place in sampled]
        token_ids, from_seat = _tokens(sequences, num_new)
        batch = Batch(
            kind="prefill",
            bucket=bucket,
            version=sequences[0].version,
            token_ids=_padded(token_ids, bucket, 0),
            from_seat=_padded(from_seat, bucket, -1),
            positions=_padded(positions, bucket, -1),
            rows=_padded(rows, bucket, 0),
            page_table=self._table.gather(seats, self._buckets.max_rows),
            blocks=self._blocks(bucket, firsts, starts, lengths),
            sample_at=_padded(ends[sampled] - 1, self._buckets.max_rows, 0),
            sampling=self._sampling(drawing, seats[sampled], totals[sampled]),
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_sampled=len(sampled),
        )
        return sampled.tolist(), batch

    def _blocks(self, bucket: int, firsts: Int32, starts: Int32, lengths: Int32) -> AttentionBlocks:
        """Query blocks of chunks at firsts[i] on the token axis, at starts[i] in their sequence."""
        is_narrow = lengths == 1
        narrow = firsts[is_narrow][np.argsort(starts[is_narrow], kind="stable")]
        is_wide, block_q = ~is_narrow, self._buckets.block_q(bucket)
        wide = _wide_blocks(block_q, bucket, firsts[is_wide], starts[is_wide], lengths[is_wide])
        padded = np.full((self._buckets.wide_blocks(bucket), block_q), bucket, np.int32)
        padded[: len(wide)] = wide
        return AttentionBlocks(
            narrow=_padded(narrow, self._buckets.max_rows, bucket),
            num_narrow=np.array(len(narrow), np.int32),
            wide=padded,
            num_wide=np.array(len(wide), np.int32),
        )

    def _sampling(self, sequences: list[Sequence], seats: Seats, positions: Int32) -> SamplingBatch:
        """How these sequences, in these seats, draw their tokens at `positions`."""
        table, num_rows = self._table, len(seats)
        bucket = self._buckets.rows_for(max(1, num_rows))
        seeds = np.zeros((bucket, 2), np.uint32)
        seeds[:num_rows] = table.seeds[seats]
        variant = VARIANTS[int(table.variant[seats].max(initial=0))]
        penalties = None
        if variant == "penalized":
            penalties = penalties_of(sequences, positions, bucket, self._buckets.max_history)
        return SamplingBatch(
            variant=variant,
            temperature=_padded(table.temperature[seats], bucket, 0),
            top_k=_padded(table.top_k[seats], bucket, 0),
            top_p=_padded(table.top_p[seats], bucket, 1),
            min_p=_padded(table.min_p[seats], bucket, 0),
            seeds=seeds,
            positions=_padded(positions, bucket, 0),
            seats=_padded(seats.astype(np.int32), bucket, self._buckets.max_rows),
            penalties=penalties,
        )


def _num_scheduled(sequences: list[Sequence]) -> Int32:
    return np.fromiter([s.num_scheduled_tokens for s in sequences], np.int32, len(sequences))


def _seats(sequences: list[Sequence]) -> Seats:
    return np.fromiter([s.seat for s in sequences], np.intp, len(sequences))


def _padded(values: Any, length: int, fill: int) -> Any:
    padded = np.full(length, fill, values.dtype)
    padded[: len(values)] = values
    return padded


def _newest(sequences: list[Sequence]) -> tuple[Int32, Int32]:
    """Each one's newest token: its id, or the seat that it was drawn in."""
    pairs = [(0, s.seat) if s.is_newest_in_seat else (s.token_ids[-1], -1) for s in sequences]
    token_ids, from_seat = np.array(pairs, np.int32).T
    return token_ids, from_seat


def _tokens(sequences: list[Sequence], num_new: list[int]) -> tuple[Int32, Int32]:
    """The same for the next num_new[i] tokens of sequence i, packed."""
    token_ids, from_seat = array("i"), array("i")
    for sequence, length in zip(sequences, num_new, strict=True):
        start = sequence.num_scheduled_tokens
        if sequence.is_newest_in_seat:  # it has drawn, so it is behind by that token only
            token_ids.append(0)
            from_seat.append(sequence.seat)
        else:
            token_ids.extend(sequence.token_ids[start : start + length])
            from_seat.extend([-1] * length)
    return np.frombuffer(token_ids, np.int32), np.frombuffer(from_seat, np.int32)


def _wide_blocks(block_q: int, bucket: int, firsts: Int32, starts: Int32, lengths: Int32) -> Int32:
    """[num_blocks, block_q] token-axis indices, `bucket` pads; in rising last position."""
    num_blocks = -(-lengths // block_q)
    chunk = np.repeat(np.arange(len(lengths)), num_blocks)
    offset = (np.arange(len(chunk)) - (np.cumsum(num_blocks) - num_blocks)[chunk]) * block_q
    last = starts[chunk] + np.minimum(offset + block_q, lengths[chunk]) - 1
    order = np.argsort(last, kind="stable")
    chunk, offset = chunk[order, None], offset[order, None] + np.arange(block_q)
    index = np.where(offset < lengths[chunk], firsts[chunk] + offset, bucket)
    return index.astype(np.int32)
