"""Attention over pages gives what plain float64 attention gives, and reads nothing else."""

from __future__ import annotations

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

SHAPES = [  # heads (H, K, D), page size
    ((1, 1, 16), 16),
    ((2, 2, 64), 128),
    ((6, 2, 16), 16),
    ((6, 2, 16), 64),
    ((6, 2, 16), 128),
    ((4, 2, 80), 64),
    ((8, 1, 64), 16),
    ((16, 2, 128), 16),
]


@jax.jit
def decode(*args: Any, scale: Any) -> jax.Array:
    return paged_attention(*args, scale=scale)


@jax.jit
def prefill(*args: Any, scale: Any) -> jax.Array:
    return ragged_paged_attention(*args, scale=scale)


def run_decode(world: World, q: np.ndarray, positions: np.ndarray) -> np.ndarray:
    out = decode(
        q,
        world.k_pages,
        world.v_pages,
        world.page_table[: len(q)],
        positions,
        scale=np.float32(world.head_dim**-0.5),
    )
    return np.asarray(out)


def run_prefill(
    world: World, q: np.ndarray, chunks: list[Chunk], *, width: int, all_narrow: bool = False
) -> np.ndarray:
    positions, rows = tokens_of(chunks, len(q))
    out = prefill(
        q,
        world.k_pages,
        world.v_pages,
        world.page_table,
        positions,
        rows,
        blocks_of(chunks, len(q), width, all_narrow=all_narrow),
        scale=np.float32(world.head_dim**-0.5),
    )
    return np.asarray(out)


@pytest.mark.parametrize(("heads", "page_size"), SHAPES)
def test_a_decode_row_attends_to_its_own_tokens(heads: tuple[int, int, int], page_size: int):
    lengths = [1, 2, 17, 127, 128, 129, 300, 64]
    world = make_world(heads, lengths, page_size=page_size)
    q = world.queries(np.random.default_rng(1), 8)
    positions = np.array(lengths, np.int32) - 1
    out = run_decode(world, q, positions)
    for row, position in enumerate(positions):
        np.testing.assert_allclose(
            out[row], world.expected(q[row], row, position), rtol=2e-4, atol=2e-5
        )


def test_a_row_may_attend_to_the_beginning_of_what_its_pages_hold():
    world = make_world((6, 2, 16), [200] * 8)
    q = world.queries(np.random.default_rng(2), 8)
    positions = np.array([0, 1, 15, 16, 100, 127, 128, 199], np.int32)
    out = run_decode(world, q, positions)
    for row, position in enumerate(positions):
        np.testing.assert_allclose(out[row], world.expected(q[row], row, position), atol=2e-5)


@pytest.mark.parametrize("num_real", [0, 1, 7, 8, 9])
def test_padding_rows_of_a_decode_step_are_zero(num_real: int):
    world = make_world((4, 2, 64), [40 + 9 * i for i in range(16)])
    q = world.queries(np.random.default_rng(3), 16)
    q[num_real:] = np.nan
    positions = np.where(np.arange(16) < num_real, 39, -1).astype(np.int32)
    out = run_decode(world, q, positions)
    assert (out[num_real:] == 0).all()
    for row in range(num_real):
        np.testing.assert_allclose(out[row], world.expected(q[row], row, 39), atol=2e-5)


@pytest.mark.parametrize("length", [1, 16, 100, 128])
def test_what_lies_behind_a_row_on_its_pages_does_not_matter(length: int):
    """Slots past the end, other pages and the rest of the table: any value, the same bits."""
    clean = make_world((6, 2, 16), [length] * 8)
    q = clean.queries(np.random.default_rng(4), 8)
    positions = np.full(8, length - 1, np.int32)
    want = run_decode(clean, q, positions)
    assert np.isfinite(want).all()
    for stale in (0.0, 1e30, -np.inf, np.inf):
        dirty = make_world((6, 2, 16), [length] * 8)
        dirty.k_pages[np.isnan(dirty.k_pages)] = stale
        dirty.v_pages[np.isnan(dirty.v_pages)] = stale
        dirty.page_table[:, -(-length // 16) :] = 0
        np.testing.assert_array_equal(run_decode(dirty, q, positions), want)


def test_large_scores_neither_overflow_nor_vanish():
    world = make_world((4, 2, 64), [300] * 8)
    q = 200 * world.queries(np.random.default_rng(5), 8)
    positions = np.full(8, 299, np.int32)
    out = run_decode(world, q, positions)
    for row in range(8):
        np.testing.assert_allclose(out[row], world.expected(q[row], row, 299), atol=2e-3)


def test_one_token_of_context_gives_its_value():
    world = make_world((6, 2, 16), [1] * 8)
    q = world.queries(np.random.default_rng(6), 8)
    out = run_decode(world, q, np.zeros(8, np.int32))
    for row in range(8):
        np.testing.assert_array_equal(out[row], np.repeat(world.values[row][0], 3, axis=0))


@pytest.mark.parametrize("page_size", [16, 128])
def test_bfloat16_pages_are_read_exactly(page_size: int):
    world = make_world((4, 2, 80), [150 + i for i in range(8)], page_size=page_size, dtype=BFLOAT16)
    q = world.queries(np.random.default_rng(7), 8).astype(BFLOAT16)
    positions = np.array([149 + i for i in range(8)], np.int32)
    out = run_decode(world, q, positions)
    assert out.dtype == BFLOAT16
    for row, position in enumerate(positions):
        want = world.expected(q[row].astype(np.float32), row, position)
        np.testing.assert_allclose(out[row].astype(np.float64), want, rtol=2**-8, atol=1e-3)


CHUNKS: list[Chunk] = [(0, 0, 37), (1, 100, 1), (2, 250, 50), (3, 0, 1), (4, 120, 16), (1, 101, 7)]


@pytest.mark.parametrize(
    ("heads", "page_size", "width"),
    [((6, 2, 16), 16, 4), ((6, 2, 16), 64, 32), ((4, 2, 80), 128, 8)],
)
def test_packed_chunks_attend_to_their_own_sequences(
    heads: tuple[int, int, int], page_size: int, width: int
):
    world = make_world(heads, [37, 108, 300, 1, 136], page_size=page_size)
    q = world.queries(np.random.default_rng(8), 128)
    out = run_prefill(world, q, CHUNKS, width=width)
    positions, rows = tokens_of(CHUNKS, 128)
    num_real = sum(length for _, _, length in CHUNKS)
    for at in range(num_real):
        want = world.expected(q[at], rows[at], positions[at])
        np.testing.assert_allclose(out[at], want, rtol=2e-4, atol=2e-5)
    assert (out[num_real:] == 0).all()


def test_a_step_of_padding_alone_is_zero():
    world = make_world((6, 2, 16), [20])
    q = np.full((16, 6, 16), np.nan, np.float32)
    assert (run_prefill(world, q, [], width=4) == 0).all()


def test_a_token_in_no_block_is_zero():
    world = make_world((6, 2, 16), [20])
    q = world.queries(np.random.default_rng(9), 16)
    chunks: list[Chunk] = [(0, 0, 16)]
    positions, rows = tokens_of(chunks, 16)
    blocks = blocks_of(chunks, 16, 4)
    blocks.wide[1, 2] = 16  # token 6 is taken out
    out = np.asarray(
        prefill(
            q,
            world.k_pages,
            world.v_pages,
            world.page_table,
            positions,
            rows,
            blocks,
            scale=np.float32(0.25),
        )
    )
    assert (out[6] == 0).all()
    for at in (5, 7):
        np.testing.assert_allclose(out[at], world.expected(q[at], 0, at), atol=2e-5)


def test_scale_multiplies_the_scores():
    world = make_world((2, 2, 16), [30] * 8)
    q = world.queries(np.random.default_rng(10), 8)
    args = (world.k_pages, world.v_pages, world.page_table, np.full(8, 29, np.int32))
    half, quarter, none = (np.float32(scale) for scale in (0.5, 0.25, 0.0))
    np.testing.assert_allclose(decode(q, *args, scale=half), decode(2 * q, *args, scale=quarter))
    flat = np.asarray(decode(q, *args, scale=none))
    for row in range(8):
        np.testing.assert_allclose(flat[row], world.values[row].mean(axis=0), atol=1e-5)


def decode_arguments(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "q": np.zeros((8, 4, 16), np.float32),
        "k_pages": np.zeros((3, 2, 16, 16), np.float32),
        "v_pages": np.zeros((3, 2, 16, 16), np.float32),
        "page_table": np.zeros((8, 2), np.int32),
        "positions": np.zeros(8, np.int32),
        "scale": 0.25,
    }
    return arguments | changes


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": zeros(7, 4, 16)}, r"multiple of 8 rows.*q \(7, 4, 16\)"),
        ({"page_table": np.zeros((16, 2), np.int32)}, r"page_table as many.*\(16, 2\)"),
        ({"q": zeros(8, 5, 16)}, r"H a multiple of 2; got \(8, 5, 16\)"),
        ({"q": zeros(8, 4, 32)}, r"\[rows, H, 16\].*got \(8, 4, 32\)"),
        ({"q": zeros(8, 64)}, r"q must be .*got \(8, 64\)"),
        ({"v_pages": zeros(3, 2, 16, 8)}, r"one shape.*\(3, 2, 16, 16\) and \(3, 2, 16, 8\)"),
        ({"k_pages": zeros(3, 2, 16), "v_pages": zeros(3, 2, 16)}, r"\[P, K, S, D\]"),
        (
            {"k_pages": zeros(3, 2, 24, 16), "v_pages": zeros(3, 2, 24, 16)},
            "page size must divide 128; got 24",
        ),
    ],
)
def test_decode_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        paged_attention(**decode_arguments(**changes))


HALF_TYPED = blocks_of([], 16, 4)._replace(narrow=np.full(8, 16, np.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": zeros(16, 3, 16)}, "H a multiple of 2"),
        ({"v_pages": zeros(4, 2, 16, 16)}, "one shape"),
        (
            {"positions": np.zeros(8, np.int32)},
            r"positions must be int32 \(16,\); got int32 \(8,\)",
        ),
        ({"rows": np.zeros(16, np.int64)}, r"rows must be int32 \(16,\); got int64 \(16,\)"),
        ({"blocks": HALF_TYPED}, "blocks' narrow must be int32; got int64"),
        ({"narrow": 7}, "multiple of 8 narrow and 2 wide ones; got 7 and 4"),
        ({"wide": 5}, "multiple of 8 narrow and 2 wide ones; got 8 and 5"),
    ],
)
def test_prefill_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str):
    blocks = blocks_of([], 16, 4)
    narrow, wide = changes.pop("narrow", 8), changes.pop("wide", 4)
    blocks = blocks._replace(
        narrow=np.full(narrow, 16, np.int32), wide=np.full((wide, 4), 16, np.int32)
    )
    token_axis: Any = np.zeros(16, np.int32)
    packed: dict[str, Any] = {"positions": token_axis, "rows": token_axis, "blocks": blocks}
    arguments = decode_arguments(q=zeros(16, 4, 16)) | packed | changes
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**arguments)
