"""A query's bits depend on its own context alone, whatever computes it beside whatever else.

Compared: decode steps of 8, 16 and 32 rows in random order beside random neighbours; narrow blocks;
wide blocks of several widths that begin anywhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.ragged_attention import ragged_paged_attention
from tests.pallas_kernels.paged_world import (
    BFLOAT16,
    Chunk,
    World,
    blocks_of,
    make_world,
    tokens_of,
)

HEADS = [(9, 3, 64), (32, 8, 128), (4, 2, 80), (3, 3, 16), (1, 1, 64)]
LENGTH = 430  # tokens of the row under test: more than three tiles
POSITIONS = [0, 1, 7, 15, 16, 63, 126, 127, 128, 129, 200, 255, 256, 257, 300, 383, 384, 400, 429]
BUCKET = 64  # tokens of a prefill step


@partial(jax.jit, static_argnames="scale")
def decode(*args: Any, scale: float) -> jax.Array:
    return paged_attention(*args, scale=scale)


@partial(jax.jit, static_argnames="scale")
def prefill(*args: Any, scale: float) -> jax.Array:
    return ragged_paged_attention(*args, scale=scale)


class Subject:
    """Row 0 is under test, with one query for each of its positions; the others are company."""

    def __init__(self, heads: tuple[int, int, int], dtype: type = np.float32):
        rng = np.random.default_rng(0)
        lengths = [LENGTH, 1, 500, 130, 128, 17, 260, 333]
        self.world: World = make_world(heads, lengths, page_size=16, dtype=dtype)
        self.lengths = np.array(lengths)
        self.queries = self.world.queries(rng, LENGTH).astype(dtype)
        self.want = {
            position: out
            for start in range(0, len(POSITIONS), 8)
            for position, out in self.decoded(POSITIONS[start : start + 8], 8, rng=None).items()
        }

    def decoded(
        self, positions: list[int], num_rows: int, rng: np.random.Generator | None
    ) -> dict[int, bytes]:
        """Bits of these queries as rows of one step; rng: places and company are random."""
        world, places = self.world, np.arange(num_rows)
        rows, at = np.zeros(num_rows, int), np.full(num_rows, -1, np.int32)
        q = np.zeros((num_rows, world.q_heads, world.head_dim), self.queries.dtype)
        if rng is not None:
            places = rng.permutation(num_rows)
            rows = rng.integers(1, len(self.lengths), num_rows)
            at = rng.integers(0, self.lengths[rows]).astype(np.int32)
            q = (10 * world.queries(rng, num_rows)).astype(q.dtype)
        places = places[: len(positions)]
        rows[places], at[places], q[places] = 0, positions, self.queries[positions]
        out = decode(
            q,
            world.k_pages,
            world.v_pages,
            world.page_table[rows],
            at,
            scale=world.head_dim**-0.5,
        )
        return self._bits(positions, np.asarray(out)[places])

    def prefilled(self, chunks: list[Chunk], width: int, *, all_narrow: bool) -> dict[int, bytes]:
        """Bits of row 0's queries in a packed step."""
        world = self.world
        positions, rows = tokens_of(chunks, BUCKET)
        q = world.queries(np.random.default_rng(width), BUCKET).astype(self.queries.dtype)
        mine = np.flatnonzero((rows == 0) & (positions >= 0))
        q[mine] = self.queries[positions[mine]]
        out = prefill(
            q,
            world.k_pages,
            world.v_pages,
            world.page_table,
            positions,
            rows,
            blocks_of(chunks, BUCKET, width, all_narrow=all_narrow),
            scale=world.head_dim**-0.5,
        )
        return self._bits(positions[mine].tolist(), np.asarray(out)[mine])

    @staticmethod
    def _bits(positions: list[int], out: np.ndarray) -> dict[int, bytes]:
        return {position: row.tobytes() for position, row in zip(positions, out, strict=True)}


@pytest.fixture(scope="module", params=HEADS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


def assert_same(got: dict[int, bytes], want: dict[int, bytes]) -> None:
    shared = got.keys() & want.keys()
    assert shared
    different = [position for position in sorted(shared) if got[position] != want[position]]
    assert not different, f"other bits at positions {different} of {sorted(shared)}"


@pytest.mark.parametrize("num_rows", [8, 16, 32])
def test_company_place_and_bucket_of_a_decode_row_change_nothing(subject: Subject, num_rows: int):
    rng = np.random.default_rng(num_rows)
    for take in (1, 3, 8):
        for _ in range(4):
            positions = rng.choice(POSITIONS, take, replace=False).tolist()
            assert_same(subject.decoded(positions, num_rows, rng), subject.want)


def chunks_around(position: int, before: int, length: int) -> list[Chunk]:
    """A chunk of row 0 that holds `position`, in company of long, short and riding ones."""
    start = max(0, min(position - before, LENGTH - length))
    return [(5, 16, 1), (2, 480, 11), (0, start, length), (3, 0, 5), (6, 259, 1)]


def test_wide_blocks_give_the_bits_of_a_decode_step(subject: Subject):
    for i, position in enumerate(POSITIONS):
        before, length = ((0, 2), (3, 21), (39, 40))[i % 3]
        chunks = chunks_around(position, before, length)
        assert_same(subject.prefilled(chunks, 32, all_narrow=False), subject.want)


@pytest.mark.parametrize("width", [1, 5, 64])
def test_any_width_of_a_wide_block_gives_the_same_bits(width: int):
    subject = Subject((6, 2, 16))
    for position in POSITIONS[::3]:
        chunks = chunks_around(position, 3, 30)
        assert_same(subject.prefilled(chunks, width, all_narrow=False), subject.want)


def test_narrow_blocks_give_the_bits_of_a_decode_step(subject: Subject):
    for position in POSITIONS:
        chunks: list[Chunk] = [(7, 300, 12), (0, position, 1), (1, 0, 1)]
        assert_same(subject.prefilled(chunks, 32, all_narrow=False), subject.want)


def test_narrow_and_wide_blocks_agree_on_every_position(subject: Subject):
    for start in range(0, LENGTH - 48, 61):
        chunks: list[Chunk] = [(0, start, 48)]
        wide = subject.prefilled(chunks, 32, all_narrow=False)
        assert_same(wide, subject.prefilled(chunks, 32, all_narrow=True))
        assert_same(wide, subject.prefilled([(2, 100, 9), *chunks], 32, all_narrow=False))


def test_bfloat16_pages_are_as_exact():
    subject = Subject((9, 3, 64), BFLOAT16)
    rng = np.random.default_rng(3)
    for num_rows in (8, 32):
        positions = rng.choice(POSITIONS, 5, replace=False).tolist()
        assert_same(subject.decoded(positions, num_rows, rng), subject.want)
    for position in POSITIONS[::3]:
        chunks = chunks_around(position, 5, 30)
        assert_same(subject.prefilled(chunks, 32, all_narrow=False), subject.want)


def test_page_size_changes_nothing():
    """The tiles are cut at absolute positions, so where a page ends is not seen."""
    outs: set[bytes] = set()
    for page_size in (16, 64, 128):
        world = make_world((6, 2, 16), [300] * 8, page_size=page_size)
        q = world.queries(np.random.default_rng(0), 8)
        for row in range(1, 8):
            world.page_table[row] = world.page_table[0]
        at = np.array([0, 5, 127, 128, 200, 255, 256, 299], np.int32)
        out = decode(q, world.k_pages, world.v_pages, world.page_table, at, scale=0.25)
        outs.add(np.asarray(out).tobytes())
    assert len(outs) == 1
