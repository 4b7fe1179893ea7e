"""The attention kernels, interpreted: float64's numbers, and a query's bits whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.backend import REFERENCE, Backend
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

EXACT = Backend("interpret")
INEXACT = Backend("interpret", is_exact=False)
FLOAT32, INT8 = np.float32, np.int8
SLOW = pytest.mark.slow
STATIC = ("scale", "window", "soft_cap", "backend")

decode = partial(jax.jit, static_argnames=STATIC)(paged_attention)
prefill = partial(jax.jit, static_argnames=STATIC)(ragged_paged_attention)


@dataclass(frozen=True)
class Case:
    """A model's attention and what its pages hold."""

    heads: tuple[int, int, int]
    q: type = BFLOAT16
    kv: type = BFLOAT16
    page_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)  # window, soft_cap

    def __str__(self) -> str:
        shape = "-".join(map(str, self.heads))
        return "-".join([shape, self.q.__name__, self.kv.__name__, *self.options])

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.q == FLOAT32 else 5e-3

    def world(self, lengths: list[int], page_size: int | None = None) -> World:
        return make_world(self.heads, lengths, page_size=page_size or self.page_size, dtype=self.kv)

    def queries(self, world: World, number: int, *, seed: int = 0) -> np.ndarray:
        return world.queries(np.random.default_rng(seed), number).astype(self.q)

    def keywords(self, world: World, backend: Backend) -> dict[str, Any]:
        scales = {"k_scales": world.k_scales, "v_scales": world.v_scales}
        return {"scale": self.heads[2] ** -0.5, "backend": backend} | scales | self.options

    def decoded(
        self, world: World, q: np.ndarray, rows: np.ndarray, positions: np.ndarray, backend: Backend
    ) -> np.ndarray:
        table = world.page_table[rows]
        keywords = self.keywords(world, backend)
        return np.asarray(decode(q, world.k_pages, world.v_pages, table, positions, **keywords))

    def prefilled(
        self,
        world: World,
        q: np.ndarray,
        chunks: list[Chunk],
        backend: Backend,
        *,
        width: int = 16,
        all_narrow: bool = False,
    ) -> np.ndarray:
        positions, rows = tokens_of(chunks, len(q))
        blocks = blocks_of(chunks, len(q), width, all_narrow=all_narrow)
        pages = (world.k_pages, world.v_pages, world.page_table)
        keywords = self.keywords(world, backend)
        return np.asarray(prefill(q, *pages, positions, rows, blocks, **keywords))

    def assert_right(
        self,
        world: World,
        q: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Against float64; padding must be 0."""
        assert out.dtype == self.q
        assert (out[positions < 0] == 0).all()
        real = np.flatnonzero(positions >= 0)
        want = np.stack(
            [
                world.expected(q[i].astype(FLOAT32), rows[i], positions[i], **self.options)
                for i in real
            ]
        )
        error = abs(out[real].astype(np.float64) - want).max() / abs(want).max()
        assert error <= self.tolerance


CASES = [
    Case((2, 2, 64), page_size=64),
    Case((6, 2, 80), FLOAT32, FLOAT32, options={"window": 70}),
    Case((8, 2, 128), kv=INT8, page_size=128),
    Case((20, 1, 96), kv=INT8, page_size=8, options={"soft_cap": 4.0, "window": 600}),
    pytest.param(Case((4, 1, 256), FLOAT32, FLOAT32, options={"soft_cap": 2.0}), marks=SLOW),
]
LENGTHS = [1, 40, 513, 700, 512, 127, 620, 129]
CHUNKS: list[Chunk] = [(3, 660, 21), (4, 511, 1), (2, 505, 8), (1, 0, 40), (0, 0, 1), (6, 600, 1)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ragged_step_gives_float64s_numbers(case: Case):
    """Wide blocks of several widths of context, and single queries through the decode kernel."""
    world = case.world(LENGTHS)
    q = case.queries(world, 80)
    q[sum(length for *_, length in CHUNKS) :] = np.nan
    positions, rows = tokens_of(CHUNKS, len(q))
    out = case.prefilled(world, q, CHUNKS, EXACT)
    case.assert_right(world, q, rows, positions, out)


WINDOW = Case((6, 2, 16), FLOAT32, FLOAT32, options={"window": 70})
ALL_OPTIONS = Case((2, 1, 16), FLOAT32, INT8, options={"soft_cap": 4.0, "window": 600})


@pytest.mark.parametrize("case", [pytest.param(WINDOW, marks=SLOW), ALL_OPTIONS], ids=str)
def test_the_reference_form_gives_float64s_numbers_with_every_option(case: Case):
    world = case.world(LENGTHS)
    q = case.queries(world, 80)
    positions, rows = tokens_of(CHUNKS, len(q))
    out = case.prefilled(world, q, CHUNKS, REFERENCE, width=32)
    case.assert_right(world, q, rows, positions, out)


def test_the_reference_form_of_a_decode_step_has_the_same_options():
    world = ALL_OPTIONS.world(LENGTHS)
    q = ALL_OPTIONS.queries(world, 8)
    rows, last = np.arange(8), np.array([*LENGTHS[:7], 0], np.int32) - 1
    out = ALL_OPTIONS.decoded(world, q, rows, last, REFERENCE)
    ALL_OPTIONS.assert_right(world, q, rows, last, out)


def test_without_exactness_the_numbers_are_as_right():
    case = Case((4, 2, 32), kv=INT8, options={"window": 300})
    world = case.world(LENGTHS)
    q = case.queries(world, 80)
    positions, rows = tokens_of(CHUNKS, len(q))
    out = case.prefilled(world, q, CHUNKS, INEXACT, width=64)
    case.assert_right(world, q, rows, positions, out)


@SLOW
def test_a_table_of_one_segment_needs_no_partial_results():
    case = Case((6, 2, 32))
    lengths = [1, 64, 65, 127, 128, 129, 240, 0]
    world = case.world([*lengths[:7], 1])
    q = case.queries(world, 8)
    q[7] = np.nan
    rows, last = np.arange(8), np.array(lengths, np.int32) - 1
    case.assert_right(world, q, rows, last, case.decoded(world, q, rows, last, EXACT))


BITS = Case((16, 8, 32), options={"window": 900})
LENGTH = 1300  # of the row under test: three segments
POSITIONS = [0, 1, 63, 64, 127, 128, 129, 300, 510, 511, 512, 513, 640, 899, 900, 1023, 1024, 1299]
COMPANY = [17, 300, 511, 512, 513, 1100, 700]


class Subject:
    """Row 0 is under test, with one query for each of its positions; the others are company."""

    def __init__(self, case: Case, page_size: int = 16):
        self.case = case
        self.lengths = np.array([LENGTH, *COMPANY])
        self.world = case.world(self.lengths.tolist(), page_size)
        self.queries = case.queries(self.world, LENGTH)

    def decoded(self, positions: list[int], num_rows: int, *, seed: int) -> dict[int, bytes]:
        """Bits of these queries as rows of one step, in random places and company."""
        rng = np.random.default_rng(seed)
        rows = rng.integers(1, len(self.lengths), num_rows)
        at = rng.integers(0, self.lengths[rows]).astype(np.int32)
        q = 10 * self.case.queries(self.world, num_rows, seed=seed)
        at[rng.random(num_rows) < 0.2] = -1
        places = rng.permutation(num_rows)[: len(positions)]
        rows[places], at[places], q[places] = 0, positions, self.queries[positions]
        out = self.case.decoded(self.world, q, rows, at, EXACT)
        return self._bits(positions, out[places])

    def prefilled(self, chunks: list[Chunk], *, all_narrow: bool = False) -> dict[int, bytes]:
        """Bits of row 0's queries in a packed step."""
        positions, rows = tokens_of(chunks, 64)
        q = 10 * self.case.queries(self.world, 64, seed=len(chunks))
        mine = np.flatnonzero((rows == 0) & (positions >= 0))
        q[mine] = self.queries[positions[mine]]
        out = self.case.prefilled(self.world, q, chunks, EXACT, width=32, all_narrow=all_narrow)
        return self._bits(positions[mine].tolist(), out[mine])

    @staticmethod
    def _bits(positions: list[int], out: np.ndarray) -> dict[int, bytes]:
        return {position: row.tobytes() for position, row in zip(positions, out, strict=True)}


def assert_same(got: dict[int, bytes], want: dict[int, bytes]) -> None:
    shared = got.keys() & want.keys()
    assert shared
    different = [position for position in sorted(shared) if got[position] != want[position]]
    assert not different, f"other bits at positions {different} of {sorted(shared)}"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(BITS)


@pytest.fixture(scope="module")
def want(subject: Subject) -> dict[int, bytes]:
    return subject.decoded(POSITIONS, 32, seed=0)


@pytest.mark.parametrize("num_rows", [8, pytest.param(96, marks=SLOW), 128])
def test_company_place_and_number_of_rows_change_no_bit(
    subject: Subject, want: dict[int, bytes], num_rows: int
):
    """Few rows share out their segments, 96 share each among two programs, 128 among none."""
    for seed, start in enumerate(range(0, len(POSITIONS), 6)):
        assert_same(subject.decoded(POSITIONS[start : start + 6], num_rows, seed=seed), want)


def chunks_around(position: int, before: int, length: int) -> list[Chunk]:
    """A chunk of row 0 that holds `position`, in company of long, short and riding ones."""
    start = max(0, min(position - before, LENGTH - length))
    return [(5, 16, 1), (2, 280, 11), (0, start, length), (3, 0, 5), (6, 259, 1)]


def test_narrow_and_wide_blocks_give_the_bits_of_a_decode_step(
    subject: Subject, want: dict[int, bytes]
):
    for i, position in enumerate(POSITIONS[::2]):
        before, length = ((0, 2), (3, 21), (39, 40))[i % 3]
        chunks = chunks_around(position, before, length)
        wide = subject.prefilled(chunks)
        assert_same(wide, want)
        assert_same(wide, subject.prefilled(chunks, all_narrow=True))


def test_the_page_size_changes_no_bit(want: dict[int, bytes]):
    assert_same(Subject(BITS, page_size=128).decoded(POSITIONS, 32, seed=5), want)


@SLOW
@pytest.mark.parametrize(
    "case",
    [
        Case((6, 2, 64), FLOAT32, FLOAT32),
        Case((4, 4, 80), kv=INT8, options={"soft_cap": 3.0}),
        Case((20, 1, 256)),
    ],
    ids=str,
)
def test_every_kind_of_model_is_as_exact(case: Case):
    subject = Subject(case)
    bits = subject.decoded(POSITIONS, 32, seed=0)
    for num_rows in (8, 16, 64):
        positions = POSITIONS[num_rows % 3 :: 3]
        assert_same(subject.decoded(positions, num_rows, seed=num_rows), bits)
    for i, position in enumerate(POSITIONS):
        before, length = ((0, 2), (3, 21), (39, 40))[i % 3]
        assert_same(subject.prefilled(chunks_around(position, before, length)), bits)


@SLOW
def test_a_long_row_is_as_exact():
    """Where segments have begun to grow: 16384 tokens and more."""
    case = Case((2, 1, 16), page_size=128)
    length = 18_000
    world = case.world([length, 17])
    own = case.queries(world, length)
    chunks: list[Chunk] = [(0, 16_370, 20), (0, 17_400, 20), (1, 3, 1)]
    positions, rows = tokens_of(chunks, 64)
    q = own[np.maximum(positions, 0)]
    wide = case.prefilled(world, q, chunks, EXACT)
    case.assert_right(world, q, rows, positions, wide)
    for start in range(0, 40, 8):
        part = slice(start, start + 8)
        narrow = case.decoded(world, q[part], rows[part], positions[part], EXACT)
        assert narrow.tobytes() == wide[part].tobytes()


def arguments(**changes: Any) -> dict[str, Any]:
    pages = np.zeros((3, 2, 16, 16), INT8)
    scales = np.zeros((3, 2, 16), np.float32)
    return {
        "q": np.zeros((8, 4, 16), BFLOAT16),
        "k_pages": pages,
        "v_pages": pages,
        "page_table": np.zeros((8, 2), np.int32),
        "positions": np.zeros(8, np.int32),
        "k_scales": scales,
        "v_scales": scales,
        "scale": 0.25,
        "backend": EXACT,
    } | changes


def pages_of(shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    pages = jax.ShapeDtypeStruct(shape, dtype)
    return {"k_pages": pages, "v_pages": pages}


HALF = pages_of((3, 2, 16, 16), np.float16) | {"k_scales": None, "v_scales": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": np.zeros((8, 2), np.int64)}, r"page_table must be int32 .*got int64"),
        ({"page_table": np.zeros(8, np.int32)}, r"page_table must be int32 .*got int32 \(8,\)"),
        ({"positions": np.zeros(8, np.int64)}, r"positions must be int32 \(8,\); got int64 \(8,\)"),
        ({"k_scales": None}, r"k_scales of int8 pages must be float32 \(3, 2, 16\); got None"),
        ({"v_scales": np.zeros((3, 2, 8), np.float32)}, r"v_scales .*got float32 \(3, 2, 8\)"),
        ({"v_scales": np.zeros((3, 2, 16), np.float64)}, r"v_scales .*got float64 \(3, 2, 16\)"),
        (pages_of((3, 2, 16, 16), BFLOAT16), r"k_scales must be None for bfloat16 pages; got fl"),
        (HALF | {"v_pages": np.zeros((3, 2, 16, 16), BFLOAT16)}, "one dtype; got float16 and bfl"),
        ({"window": 0}, "window must be at least 1 token; got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be above 0; got 0"),
        (
            pages_of((2**14, 2, 128, 512), INT8)
            | {"q": np.zeros((8, 4, 512), BFLOAT16)}
            | dict.fromkeys(
                ("k_scales", "v_scales"), jax.ShapeDtypeStruct((2**14, 2, 128), np.float32)
            ),
            "k_pages must have fewer than",
        ),
    ],
)
@pytest.mark.parametrize("backend", [EXACT, REFERENCE], ids=["kernel", "reference"])
def test_arguments_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, backend: Backend
):
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments(**{"backend": backend} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (HALF, "k_pages must be int8 or bfloat16 as q for a kernel; got float16"),
        ({"scale": np.float32(0.5)}, "scale must be a Python float for a kernel; got float32"),
        ({"q": np.zeros((8, 66, 16), BFLOAT16)}, r"at most 32 heads per KV head .*\(8, 66, 16\)"),
        (
            pages_of((3, 2, 16, 512), INT8) | {"q": np.zeros((8, 4, 512), BFLOAT16)},
            r"head dim at most 256 .*got \(8, 4, 512\)",
        ),
        (
            pages_of((3, 2, 4, 16), INT8)
            | dict.fromkeys(("k_scales", "v_scales"), np.zeros((3, 2, 4), np.float32)),
            "page size must be at least 8 for a kernel; got 4",
        ),
    ],
)
def test_what_only_the_reference_form_takes_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments(**changes))
