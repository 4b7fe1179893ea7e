"""The rows of a step -> its padded numpy arrays.

Host only: no JAX. No array is written again once a batch holds it: a device may still read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.scheduling.batch import AttentionBlocks, Batch, Int32, SamplingBatch
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.penalties import penalties_of
from jaxinfer.scheduling.running_table import VARIANTS, RunningTable, Seats
from jaxinfer.scheduling.scheduled import Rows
from jaxinfer.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Lasting:
    """What a step can take over from the one before it, if the same sequences are in it."""

    num_sat: int
    seats: Seats
    sampling: SamplingBatch  # but for its positions and penalties
    num_writes: int
    page_table: Int32


class BatchBuilder:
    """Builds the batches of sequences that sit in `table`."""

    def __init__(self, buckets: Buckets, table: RunningTable):
        self._buckets = buckets
        self._table = table
        self._last: _Lasting | None = None

    def decode(self, seats: Seats, version: str) -> tuple[Rows, Batch]:
        """One token for each sequence, all behind by one; rows in rising context length."""
        at = self._table.num_scheduled[seats]
        if (at[1:] < at[:-1]).any():
            order = np.argsort(at, kind="stable")
            seats, at = seats[order], at[order]
        num_rows = len(seats)
        bucket = self._buckets.rows_for(num_rows)
        lasting = self._lasting(seats, bucket)
        token_ids, from_seat = np.zeros(bucket, np.int32), np.full(bucket, -1, np.int32)
        self._write_newest(seats, np.arange(num_rows), token_ids, from_seat)
        places = np.arange(num_rows, dtype=np.int32)
        batch = Batch(
            kind="decode",
            bucket=bucket,
            version=version,
            token_ids=token_ids,
            from_seat=from_seat,
            positions=_padded(at, bucket, -1),
            rows=_padded(places, bucket, 0),
            page_table=lasting.page_table,
            blocks=None,
            sample_at=_padded(places, self._buckets.max_rows, 0),
            sampling=self._drawing(lasting.sampling, seats, at + 1),
            num_seqs=num_rows,
            num_tokens=num_rows,
            num_sampled=num_rows,
        )
        return Rows(seats, np.ones(num_rows, np.int32), np.arange(num_rows)), batch

    def _lasting(self, seats: Seats, bucket: int) -> _Lasting:
        table, last = self._table, self._last
        is_same = last and last.num_sat == table.num_sat and np.array_equal(last.seats, seats)
        if last and is_same and last.num_writes == table.num_writes:
            return last
        sampling = last.sampling if last and is_same else self._sampling(seats)
        pages = table.gather(seats, bucket)
        self._last = _Lasting(table.num_sat, seats, sampling, table.num_writes, pages)
        return self._last

    def prefill(
        self, decoding: Seats, others: list[Sequence], num_new: list[int], version: str
    ) -> tuple[Rows, Batch]:
        """A token for each that decodes, and behind them chunks: num_new[i] tokens of others[i]."""
        table, num_riders = self._table, len(decoding)
        seats = np.concatenate([decoding, np.array([s.seat for s in others], np.intp)])
        lengths = np.ones(len(seats), np.int32)
        lengths[num_riders:] = num_new
        starts = table.num_scheduled[seats]
        ends = np.cumsum(lengths, dtype=np.int32)
        firsts, num_tokens = ends - lengths, int(ends[-1])
        bucket = self._buckets.tokens_for(num_tokens)
        rows = np.repeat(np.arange(len(seats), dtype=np.int32), lengths)
        positions = np.arange(num_tokens, dtype=np.int32) + (starts - firsts)[rows]
        token_ids, from_seat = np.zeros(bucket, np.int32), np.full(bucket, -1, np.int32)
        self._write_newest(decoding, firsts[:num_riders], token_ids, from_seat)
        is_sampled = np.ones(len(seats), np.bool_)
        for row, sequence in enumerate(others, num_riders):
            start, end = int(starts[row]), int(starts[row]) + int(lengths[row])
            token_ids[firsts[row] : ends[row]] = sequence.token_ids[start:end]
            is_sampled[row] = end == len(sequence.token_ids)
        sampled = np.flatnonzero(is_sampled)
        batch = Batch(
            kind="prefill",
            bucket=bucket,
            version=version,
            token_ids=token_ids,
            from_seat=from_seat,
            positions=_padded(positions, bucket, -1),
            rows=_padded(rows, bucket, 0),
            page_table=table.gather(seats, self._buckets.max_rows),
            blocks=self._blocks(bucket, firsts, starts, lengths),
            sample_at=_padded(ends[sampled] - 1, self._buckets.max_rows, 0),
            sampling=self._drawing(
                self._sampling(seats[sampled]), seats[sampled], (starts + lengths)[sampled]
            ),
            num_seqs=len(seats),
            num_tokens=num_tokens,
            num_sampled=len(sampled),
        )
        return Rows(seats, lengths, sampled), batch

    def _write_newest(self, seats: Seats, places: Any, token_ids: Int32, from_seat: Int32) -> None:
        """The newest token of each seat at its place: that it is on the device, or its id."""
        has_drawn = self._table.has_drawn[seats]
        from_seat[places] = np.where(has_drawn, seats, -1)
        if not has_drawn.all():
            known = np.flatnonzero(~has_drawn)
            sequences = self._table.sequences(seats[known])
            token_ids[places[known]] = [sequence.token_ids[-1] for sequence in sequences]

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

    def _sampling(self, seats: Seats) -> SamplingBatch:
        """How the sequences in these seats draw, wherever they are."""
        table, num_rows = self._table, len(seats)
        bucket = self._buckets.rows_for(max(1, num_rows))
        seeds = np.zeros((bucket, 2), np.uint32)
        seeds[:num_rows] = table.seeds[seats]
        return SamplingBatch(
            variant=VARIANTS[int(table.variant[seats].max(initial=0))],
            temperature=_padded(table.temperature[seats], bucket, 0),
            top_k=_padded(table.top_k[seats], bucket, 0),
            top_p=_padded(table.top_p[seats], bucket, 1),
            min_p=_padded(table.min_p[seats], bucket, 0),
            seeds=seeds,
            positions=np.zeros(bucket, np.int32),
            seats=_padded(seats.astype(np.int32), bucket, self._buckets.max_rows),
            penalties=None,
        )

    def _drawing(self, sampling: SamplingBatch, seats: Seats, positions: Int32) -> SamplingBatch:
        """`sampling` of these seats, for tokens at `positions`."""
        bucket, penalties = len(sampling.positions), None
        if sampling.variant == "penalized":
            sequences = self._table.sequences(seats)
            penalties = penalties_of(sequences, positions, bucket, self._buckets.max_history)
        return replace(sampling, positions=_padded(positions, bucket, 0), penalties=penalties)


def _padded(values: Any, length: int, fill: int) -> Any:
    padded = np.full(length, fill, values.dtype)
    padded[: len(values)] = values
    return padded


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
