"""Batches against a slow and obvious reference."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.batch_builder import BatchBuilder
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.running_table import RunningTable, Seats
from jaxinfer.scheduling.sequence import Sequence
from tests.fakes import batch_faults

GREEDY = SamplingParams(temperature=0)
BUCKETS = Buckets.for_limits(
    max_num_seqs=16, max_num_batched_tokens=256, max_model_len=640, page_size=16
)


class World:
    """Sequences that sit at a table, with pages that nobody else has."""

    def __init__(self) -> None:
        self.table = RunningTable(16, BUCKETS.max_pages_per_seq, 16)
        self.builder = BatchBuilder(BUCKETS, self.table)
        self.next_page = 1

    def sit(
        self, num_tokens: int, num_computed: int, sampling: SamplingParams = GREEDY, seed: int = 0
    ) -> Sequence:
        token_ids = tuple(100 * self.next_page + i for i in range(num_tokens))
        new = Sequence(Request("r", token_ids, sampling), index=0, seed=seed, version="v7")
        num_pages = -(-num_tokens // 16)
        new.page_table = list(range(self.next_page, self.next_page + num_pages))
        self.next_page += num_pages
        self.table.sit(new, num_computed)
        return new

    def decode(self, *sequences: Sequence) -> tuple[list[Sequence], Batch]:
        """The sequences in the order of the rows."""
        rows, batch = self.builder.decode(seats(sequences), "v7")
        assert rows.num_new.tolist() == [1] * len(sequences)
        assert rows.sampled.tolist() == list(range(len(sequences)))
        return self.table.sequences(rows.seats), batch

    def prefill(
        self, *chunks: tuple[Sequence, int], riders: tuple[Sequence, ...] = ()
    ) -> tuple[list[int], Batch]:
        """The rows that are sampled."""
        others, num_new = [s for s, _ in chunks], [n for _, n in chunks]
        rows, batch = self.builder.prefill(seats(riders), others, num_new, "v7")
        assert self.table.sequences(rows.seats) == [*riders, *others]
        assert rows.num_new.tolist() == [1] * len(riders) + num_new
        return rows.sampled.tolist(), batch


def seats(sequences: Iterable[Sequence]) -> Seats:
    return np.array([s.seat for s in sequences], np.intp)


def test_a_decode_batch_holds_the_newest_token_of_each_row():
    world = World()
    long, short = world.sit(40, 39), world.sit(3, 2)
    ordered, batch = world.decode(long, short)
    assert ordered == [short, long]
    assert batch.token_ids.tolist() == [short.token_ids[2], long.token_ids[39], *[0] * 6]
    assert batch.positions.tolist() == [2, 39, *[-1] * 6]
    assert batch.rows.tolist() == [0, 1, *[0] * 6]
    assert batch.page_table[0, :2].tolist() == [short.page_table[0], 0]
    assert batch.page_table[1, :4].tolist() == [*long.page_table, 0]
    assert batch.sample_at.tolist() == [0, 1, *[0] * 14]
    assert batch.sampling.positions.tolist()[:2] == [3, 40]
    assert (batch.kind, batch.bucket, batch.version) == ("decode", 8, "v7")
    assert batch_faults(batch) == []


def test_decode_rows_stay_ordered_while_sequences_come_grow_and_go():
    world, rng = World(), random.Random(3)
    running = [world.sit(n, n - 1) for n in (30, 5, 60, 12)]
    for step in range(60):
        ordered, batch = world.decode(*running)
        assert batch_faults(batch) == []
        for row, each in enumerate(ordered):
            assert batch.token_ids[row] == each.token_ids[-1]
            assert batch.positions[row] == each.num_scheduled_tokens
            assert batch.sampling.positions[row] == each.num_tokens
            pages = batch.page_table[row, : len(each.page_table)].tolist()
            assert pages == each.page_table
        for each in running:
            if step % 7 == 3 and rng.random() < 0.5:
                continue  # found no page in this step
            world.table.num_scheduled[each.seat] += 1
            each.token_ids.append(rng.randrange(1000))
            if each.num_scheduled_tokens == 16 * len(each.page_table):
                world.table.add_pages(each, [world.next_page])
                world.next_page += 1
        running = [s for s in running if s.num_behind == 1]
        if step % 13 == 12:
            world.table.stand(running.pop(0))
            running.append(world.sit(step, step - 1))


def test_a_seat_that_changed_hands_between_two_steps_is_noticed():
    world = World()
    first, second = world.sit(5, 4), world.sit(9, 8)
    world.decode(first, second)
    world.table.stand(first)
    world.table.stand(second)
    for each, at in ((first, 4), (second, 8)):  # the same two, in each other's seats
        world.table.sit(each, at)
    _, batch = world.decode(first, second)
    assert batch.page_table[0, 0] == first.page_table[0]
    assert batch.page_table[1, 0] == second.page_table[0]


def test_a_batch_is_not_changed_by_the_next():
    world = World()
    running = world.sit(5, 4, SamplingParams(temperature=0.5))
    _, batch = world.decode(running)
    before = (batch.page_table.copy(), batch.positions.copy(), batch.sampling.positions.copy())
    running.token_ids.append(1)
    world.table.num_scheduled[running.seat] += 1
    world.table.add_pages(running, [77])
    world.decode(running)
    after = (batch.page_table, batch.positions, batch.sampling.positions)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_prefill_batch_packs_chunks_one_after_another():
    world = World()
    whole, middle, rider = world.sit(4, 0), world.sit(50, 20), world.sit(8, 7)
    sampled, batch = world.prefill((whole, 4), (middle, 5), riders=(rider,))
    assert sampled == [0, 1]
    assert batch.token_ids[:10].tolist() == [
        rider.token_ids[7],
        *whole.token_ids,
        *middle.token_ids[20:25],
    ]
    assert batch.positions.tolist() == [7, 0, 1, 2, 3, 20, 21, 22, 23, 24, *[-1] * 6]
    assert batch.rows.tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, *[0] * 6]
    assert batch.sample_at[:3].tolist() == [0, 4, 0]
    assert batch.sampling.positions[:2].tolist() == [8, 4]
    assert (batch.num_seqs, batch.num_tokens, batch.num_sampled) == (3, 10, 2)
    assert batch.page_table.shape == (16, 40)
    assert batch_faults(batch) == []


def test_a_step_may_sample_nothing():
    world = World()
    sampled, batch = world.prefill((world.sit(50, 0), 20))
    assert (sampled, batch.num_sampled, batch.sampling.variant) == ([], 0, "greedy")
    assert len(batch.sampling.temperature) == 8


def test_one_token_of_a_long_prompt_is_a_narrow_block_and_is_not_sampled():
    world = World()
    sampled, batch = world.prefill((world.sit(50, 10), 1), (world.sit(9, 0), 9))
    assert sampled == [1]
    assert batch.blocks is not None
    assert (batch.blocks.num_narrow, batch.blocks.narrow[0]) == (1, 0)
    assert batch.blocks.num_wide == 1


def slow_blocks(chunks: list[tuple[int, int]], block_q: int) -> tuple[list[int], list[list[int]]]:
    """(start, length) of each chunk -> narrow and wide blocks in the order that is promised."""
    narrow, wide, first = [], [], 0
    for start, length in chunks:
        if length == 1:
            narrow.append((start, first))
        for offset in range(0, length if length > 1 else 0, block_q):
            block = list(range(first + offset, first + min(offset + block_q, length)))
            wide.append((start + min(offset + block_q, length) - 1, block))
        first += length
    narrow.sort(key=lambda pair: pair[0])
    wide.sort(key=lambda pair: pair[0])
    return [at for _, at in narrow], [block for _, block in wide]


@pytest.mark.parametrize("seed", range(30))
def test_attention_blocks_match_the_reference(seed):
    rng, world, chunks, left = random.Random(seed), World(), [], 256
    while left and len(chunks) < 16:
        length = min(left, rng.choice((1, 1, 2, 3, 31, 32, 33, 70)))
        start = rng.randrange(500)
        chunks.append((world.sit(start + length + rng.randrange(2), start), length))
        left -= length
    _, batch = world.prefill(*chunks)
    block_q = BUCKETS.block_q(batch.bucket)
    narrow, wide = slow_blocks([(s.num_computed_tokens, n) for s, n in chunks], block_q)
    assert batch.blocks is not None
    assert batch_faults(batch) == []
    assert batch.blocks.narrow[: int(batch.blocks.num_narrow)].tolist() == narrow
    real = batch.blocks.wide[: int(batch.blocks.num_wide)].tolist()
    assert [[i for i in block if i != batch.bucket] for block in real] == wide
    assert batch.blocks.narrow.shape == (BUCKETS.max_rows,)
    assert batch.blocks.wide.shape == (BUCKETS.wide_blocks(batch.bucket), block_q)


@pytest.mark.parametrize(
    ("sampling", "variant"),
    [
        (SamplingParams(temperature=0), "greedy"),
        (SamplingParams(temperature=1e-6, top_k=5, top_p=0.1), "greedy"),
        (SamplingParams(temperature=0, logprobs=0), "greedy"),
        (SamplingParams(temperature=0, logprobs=1), "full"),
        (SamplingParams(temperature=1), "plain"),
        (SamplingParams(temperature=1, top_k=-1, top_p=1.0), "plain"),
        (SamplingParams(temperature=1, logprobs=0), "plain"),
        (SamplingParams(temperature=1, top_k=1), "full"),
        (SamplingParams(temperature=1, top_p=0.99), "full"),
        (SamplingParams(temperature=1, min_p=0.01), "full"),
    ],
)
def test_the_variant_is_the_least_that_does_what_was_asked(sampling, variant):
    world = World()
    _, batch = world.decode(world.sit(4, 3, sampling), world.sit(5, 4))
    assert batch.sampling.variant == variant


def test_the_variant_is_that_of_the_sampled_rows_only():
    world = World()
    drawing = world.sit(50, 0, SamplingParams(temperature=1, top_k=3))
    _, batch = world.prefill((world.sit(4, 0), 4), (drawing, 10))
    assert batch.sampling.variant == "greedy"


def test_each_row_carries_its_own_sampling_and_padding_is_greedy():
    world = World()
    sampling = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    drawing = world.sit(4, 3, sampling, seed=1)
    _, batch = world.decode(world.sit(3, 2), drawing)
    rows = batch.sampling
    assert rows.temperature.tolist() == [0, 0.5, *[0] * 6]
    assert rows.top_k.tolist() == [0, 7, *[0] * 6]
    assert rows.top_p.tolist() == [1, 0.25, *[1] * 6]
    assert rows.min_p.tolist() == [0, 0.125, *[0] * 6]
    assert int(rows.seeds[1, 0]) + (int(rows.seeds[1, 1]) << 32) == drawing.seed
    dtypes = [a.dtype for a in (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds)]
    assert dtypes == [np.float32, np.int32, np.float32, np.float32, np.uint32]


def test_a_greedy_row_carries_no_filters():
    world = World()
    _, batch = world.decode(world.sit(3, 2, SamplingParams(temperature=0, top_k=9)))
    assert batch.sampling.top_k.tolist() == [0] * 8


def test_a_huge_top_k_fits_into_an_int32():
    world = World()
    _, batch = world.decode(world.sit(3, 2, SamplingParams(top_k=10**12)))
    assert batch.sampling.top_k[0] == 2**31 - 1


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16])
def test_decode_shapes_are_those_of_the_row_bucket(num_rows):
    world = World()
    _, batch = world.decode(*(world.sit(4 + i, 3 + i) for i in range(num_rows)))
    bucket = 8 if num_rows <= 8 else 16
    assert batch.token_ids.shape == batch.sampling.temperature.shape == (bucket,)
    assert batch.page_table.shape == (bucket, 40)
    assert batch.sample_at.shape == (16,)


def test_seats_are_given_again_and_their_lines_are_clean():
    world = World()
    first, _ = world.sit(40, 0), world.sit(4, 0)
    seat, sitting = first.seat, int(world.table.sitting[first.seat])
    world.table.stand(first)
    assert (first.seat, first.table, world.table.sitting[seat]) == (-1, None, 0)
    third = world.sit(20, 0)
    assert third.seat == seat
    assert world.table.sitting[seat] > sitting
    assert world.table.page_table[seat].tolist() == [*third.page_table, *[0] * 38]


def test_what_was_drawn_in_a_seat_is_read_from_there_until_somebody_else_has_it():
    world = World()
    first, second = world.sit(5, 4), world.sit(9, 8)
    world.table.has_drawn[first.seat] = True
    _, batch = world.decode(first, second)
    assert batch.from_seat.tolist() == [first.seat, *[-1] * 7]
    assert batch.token_ids.tolist() == [0, second.token_ids[-1], *[0] * 6]
    _, batch = world.prefill((world.sit(4, 0), 4), riders=(second, first))
    assert batch.from_seat[:6].tolist() == [-1, first.seat, -1, -1, -1, -1]
    assert batch.token_ids[:2].tolist() == [second.token_ids[-1], 0]
    assert batch.sampling.seats[:3].tolist() == [second.seat, first.seat, 2]
    world.table.stand(first)
    other = world.sit(5, 4)
    _, batch = world.decode(other)
    assert batch.from_seat.tolist() == [-1] * 8
    assert batch.token_ids[0] == other.token_ids[-1]


def test_a_page_that_is_added_or_swapped_shows_in_the_next_batch_only():
    world = World()
    running = world.sit(16, 15)
    _, before = world.decode(running)
    world.table.add_pages(running, [77])
    running.page_table[0] = 55
    world.table.copy_pages(running, [0])
    _, after = world.decode(running)
    assert before.page_table[0, :2].tolist() == [1, 0]
    assert after.page_table[0, :2].tolist() == [55, 77]
