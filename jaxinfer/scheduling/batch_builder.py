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
from jaxinfer.scheduling.scheduled import Places, Rows
from jaxinfer.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Formation:
    """A decode step, of which the next one takes over what stays if the same sequences go on."""

    given: Seats  # in the order of the call
    num_sat: int  # RunningTable.num_sat: a seat is somebody else's only after it has grown
    num_writes: int  # RunningTable.num_writes: page tables are these until it has grown
    rows: Rows
    batch: Batch


class BatchBuilder:
    """Builds the batches of sequences that sit in `table`."""

    def __init__(self, buckets: Buckets, table: RunningTable):
        self._buckets = buckets
        self._table = table
        self._last: _Formation | None = None

    def decode(self, seats: Seats, version: str) -> tuple[Rows, Batch]:
        """One token for each sequence, all behind by one; rows in rising context length."""
        formation = self._further(seats) or self._formed(seats, version)
        # If somebody's newest token comes from the host now, it will not in the next step.
        self._last = None if len(formation.rows.fresh) else formation
        return formation.rows, formation.batch

    def _further(self, given: Seats) -> _Formation | None:
        """The last step's sequences a token further; None if they or their order are others."""
        last, table = self._last, self._table
        if (
            last is None
            or last.num_sat != table.num_sat
            or not np.array_equal(last.given, given)
            or _falls(at := table.num_scheduled[last.rows.seats])
        ):
            return None
        rows, batch = last.rows, last.batch
        is_written = last.num_writes != table.num_writes
        pages = table.gather(rows.seats, batch.bucket) if is_written else batch.page_table
        further = replace(
            batch,
            positions=_padded(at, batch.bucket, -1),
            page_table=pages,
            sampling=self._drawing(batch.sampling, rows.seats, at + 1),
        )
        return _Formation(given, table.num_sat, table.num_writes, rows, further)

    def _formed(self, given: Seats, version: str) -> _Formation:
        table, num_rows = self._table, len(given)
        seats = given[np.argsort(table.num_scheduled[given], kind="stable")]
        at = table.num_scheduled[seats]
        bucket = self._buckets.rows_for(num_rows)
        places = np.arange(num_rows, dtype=np.int32)
        token_ids, from_seat = np.zeros(bucket, np.int32), np.full(bucket, -1, np.int32)
        fresh = self._write_newest(seats, places, token_ids, from_seat)
        batch = Batch(
            kind="decode",
            bucket=bucket,
            version=version,
            token_ids=token_ids,
            from_seat=from_seat,
            positions=_padded(at, bucket, -1),
            rows=_padded(places, bucket, 0),
            page_table=table.gather(seats, bucket),
            blocks=None,
            sample_at=_padded(places, self._buckets.max_rows, 0),
            sampling=self._drawing(self._sampling(seats), seats, at + 1),
            num_seqs=num_rows,
            num_tokens=num_rows,
            num_sampled=num_rows,
        )
        rows = Rows(seats, np.ones(num_rows, np.int32), np.arange(num_rows), fresh)
        return _Formation(given, table.num_sat, table.num_writes, rows, batch)

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
        fresh = self._write_newest(decoding, firsts[:num_riders], token_ids, from_seat)
        is_sampled = np.ones(len(seats), np.bool_)
        for row, sequence in enumerate(others, num_riders):
            start, end = int(starts[row]), int(starts[row]) + int(lengths[row])
            token_ids[firsts[row] : ends[row]] = sequence.token_ids[start:end]
            is_sampled[row] = end == len(sequence.token_ids)
        sampled = np.flatnonzero(is_sampled)
        fresh = np.concatenate([fresh, sampled[sampled >= num_riders]])
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
        return Rows(seats, lengths, sampled, fresh), batch

    def _write_newest(
        self, seats: Seats, places: Int32, token_ids: Int32, from_seat: Int32
    ) -> Places:
        """The newest token of each seat at its place: that it is on the device, or its id.

        Returns: the rows of which the host has it.
        """
        has_drawn = self._table.has_drawn[seats]
        from_seat[places] = np.where(has_drawn, seats, -1)
        known = np.flatnonzero(~has_drawn)
        sequences = self._table.sequences(seats[known])
        token_ids[places[known]] = [sequence.token_ids[-1] for sequence in sequences]
        return known

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


def _falls(numbers: Int32) -> bool:
    return bool((numbers[1:] < numbers[:-1]).any())


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
