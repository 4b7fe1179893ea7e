"""Sequences whose keys and values lie on shuffled pages, and attention over them in float64.

Whatever no sequence has written is NaN, so a read too far shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallas_kernels.query_blocks import NARROW_GROUP, WIDE_GROUP, QueryBlocks

Chunk = tuple[int, int, int]  # row, first position, number of tokens


@dataclass
class World:
    """`lengths[i]` tokens of row i, in pages of `page_size`."""

    q_heads: int
    keys: list[np.ndarray]  # float32[tokens, K, D] of each row, as the pages hold them
    values: list[np.ndarray]
    k_pages: np.ndarray  # [P, K, S, D]
    v_pages: np.ndarray
    page_table: np.ndarray  # int32[rows, M]
    k_scales: np.ndarray | None  # float32[P, K, S] of int8 pages
    v_scales: np.ndarray | None

    @property
    def head_dim(self) -> int:
        return self.k_pages.shape[3]

    def queries(self, rng: np.random.Generator, number: int) -> np.ndarray:
        return rng.normal(size=(number, self.q_heads, self.head_dim)).astype(np.float32)

    def expected(
        self,
        q: np.ndarray,
        row: int,
        position: int,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> np.ndarray:
        """float64[H, D]: softmax over the tokens 0..position of a row, or the window's last."""
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        keys, values = (x[row][seen].astype(np.float64) for x in (self.keys, self.values))
        shared = self.q_heads // keys.shape[1]
        keys, values = np.repeat(keys, shared, axis=1), np.repeat(values, shared, axis=1)
        scores = np.einsum("hd,uhd->hu", q.astype(np.float64), keys) * self.head_dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("hu,uhd->hd", weights, values)


def make_world(
    heads: tuple[int, int, int],
    lengths: Sequence[int],
    *,
    page_size: int = 16,
    dtype: type = np.float32,
    seed: int = 0,
) -> World:
    """Rows on pages in random order; table entries past a row's last page point anywhere.

    int8 pages get a scale per token and head.
    Sizes are rounded up, so that few shapes are compiled. The content does not depend on page_size.
    """
    q_heads, kv_heads, head_dim = heads
    rng, contents = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    counts = [-(-length // page_size) for length in lengths]
    num_pages, width = _above(sum(counts), 64), _above(max(counts), 8)
    order = rng.permutation(num_pages)
    shape = (num_pages, kv_heads, page_size, head_dim)
    is_int8 = dtype == np.int8
    unused = 127 if is_int8 else np.nan
    k_pages, v_pages = np.full(shape, unused, dtype), np.full(shape, unused, dtype)
    k_scales, v_scales = (np.full(shape[:3], np.nan, np.float32) for _ in range(2))
    table = rng.integers(0, num_pages, (len(lengths), width)).astype(np.int32)
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own, order = order[:count], order[count:]
        table[row, :count] = own
        kv = contents.normal(size=(2, length, kv_heads, head_dim))
        scales = (abs(kv).max(axis=-1) / 127 if is_int8 else np.ones(kv.shape[:3])).astype(
            np.float32
        )
        k, v = (np.round(kv / scales[..., None]) if is_int8 else kv).astype(dtype)
        place = np.arange(length)
        at = own[place // page_size], slice(None), place % page_size
        k_pages[at], v_pages[at] = k, v
        k_scales[at], v_scales[at] = scales
        keys.append(k.astype(np.float32) * scales[0, ..., None])
        values.append(v.astype(np.float32) * scales[1, ..., None])
    if not is_int8:
        return World(q_heads, keys, values, k_pages, v_pages, table, None, None)
    return World(q_heads, keys, values, k_pages, v_pages, table, k_scales, v_scales)


def _above(number: int, step: int) -> int:
    return (number // step + 1) * step


BFLOAT16 = ml_dtypes.bfloat16


def tokens_of(chunks: Sequence[Chunk], bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """positions and rows int32[bucket] of packed chunks; -1 and 0 pad."""
    positions, rows = np.full(bucket, -1, np.int32), np.zeros(bucket, np.int32)
    at = 0
    for row, start, length in chunks:
        positions[at : at + length] = np.arange(start, start + length)
        rows[at : at + length] = row
        at += length
    return positions, rows


def blocks_of(
    chunks: Sequence[Chunk], bucket: int, width: int, *, all_narrow: bool = False
) -> QueryBlocks:
    """Chunks of one token as narrow blocks, longer ones as wide blocks (or all narrow).

    The numbers of blocks depend on bucket and width alone, as an engine's do.
    """
    narrow: list[int] = []
    wide: list[list[int]] = []
    at = 0
    for _, _, length in chunks:
        places = list(range(at, at + length))
        if length == 1 or all_narrow:
            narrow += places
        else:
            wide += [places[i : i + width] for i in range(0, length, width)]
        at += length
    num_narrow = -(-bucket // NARROW_GROUP) * NARROW_GROUP
    num_wide = (-(-bucket // width) // WIDE_GROUP + 2) * WIDE_GROUP
    narrow_blocks = np.full(num_narrow, bucket, np.int32)
    narrow_blocks[: len(narrow)] = narrow
    wide_blocks = np.full((num_wide, width), bucket, np.int32)
    for i, block in enumerate(wide):
        wide_blocks[i, : len(block)] = block
    return QueryBlocks(
        narrow_blocks, np.array(len(narrow), np.int32), wide_blocks, np.array(len(wide), np.int32)
    )
