"""The arithmetic of attention inside a kernel: KV tiles, segments of them, and adding segments up.

Decode and ragged kernels trace the same functions with the same KV tile, so a query's bits do not
depend on which of them computes it. An online softmax (FlashAttention-2, arXiv:2307.08691) with
three changes that keep those bits out of a compiler's hands:
- scores are in base 2 and the running maximum is rounded up to an integer: a rescaling is by a
  power of two, built from its bits, and exact, so fusing it with an addition changes nothing;
- a row's sum of weights is a product with ones: its order is that of the other products;
- a mask's select stands between the scaling of a score and the subtraction of the maximum: these
  two cannot be fused.

int8 KV enters the products as it is; the scale of a token multiplies its column of the scores, or
of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention_arguments import KVPages, Scoring
from pallas_kernels.attention_segments import segment_of, segment_start
from pallas_kernels.backend import AttentionTiles

MASKED = -1e30  # score of a token that is not seen
LOWEST_TOP = -1e29  # where a maximum begins: exp2(MASKED - LOWEST_TOP) is 0
LANES = 16  # equal columns of a sum of weights: the narrowest product
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class TileShape:
    """What is known while a kernel is traced."""

    scoring: Scoring
    tiles: AttentionTiles
    page_size: int
    head_dim: int
    num_ranges: int | None  # None: segments at absolute positions; else ranges of equal length

    @property
    def width(self) -> int:
        """The head dim's axis in a kernel, whose axes are powers of two."""
        return max(16, pl.next_power_of_2(self.head_dim))


class Queries(NamedTuple):
    """The rows of a program's product: queries of one row of the page table for one KV head."""

    q: jax.Array  # float[rows, width]
    positions: jax.Array  # int32[rows]; -1 sees nothing
    row: jax.Array  # int32[]: of the page table
    head: jax.Array  # int32[]: KV head
    first: jax.Array  # int32[]: lowest and highest of the positions
    last: jax.Array  # -1: there are no queries


class Partial(NamedTuple):
    """A softmax over some of the tokens: sums of 2**(score - top) and of that times the value."""

    acc: jax.Array  # float32[rows, width]
    total: jax.Array  # float32[rows, LANES], equal columns, or [rows, 1]
    top: jax.Array  # float32[rows]: an integer


def empty_partial(rows: int, width: int, lanes: int = LANES) -> Partial:
    return Partial(
        jnp.zeros((rows, width), jnp.float32),
        jnp.zeros((rows, lanes), jnp.float32),
        jnp.full((rows,), LOWEST_TOP, jnp.float32),
    )


def fold(a: Partial, b: Partial) -> Partial:
    """Adds two partial results, a's tokens first."""
    top = jnp.maximum(a.top, b.top)
    keep, add = _power_of_two(a.top - top)[:, None], _power_of_two(b.top - top)[:, None]
    return Partial(a.acc * keep + b.acc * add, a.total * keep + b.total * add, top)


def result(partial: Partial) -> jax.Array:
    """float32[rows, width]; 0 for a row that has seen no token."""
    total = jnp.maximum(jnp.max(partial.total, axis=1), 1e-30)
    out = partial.acc / total[:, None]
    return jnp.where(out == 0, 0.0, out)  # a tile without weight may have made -0 of 0


@dataclass(frozen=True, slots=True)
class Ranges:
    """The pieces of a KV range that are computed apart: number i from 0 to count - 1."""

    count: jax.Array  # int32[]
    bounds: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    """int32[] -> first and last + 1 position, multiples of the KV tile."""


def kv_ranges(shape: TileShape, first: jax.Array, last: jax.Array) -> Ranges:
    """What queries at positions first..last see, cut as `shape` says."""
    window, tile = shape.scoring.window, shape.tiles.kv
    low = jnp.int32(0) if window is None else jnp.maximum(first - (window - 1), 0)
    low_tile, end_tile = lax.div(low, tile), lax.div(last + tile, tile)
    if shape.num_ranges is not None:
        share = lax.div(end_tile - low_tile + (shape.num_ranges - 1), shape.num_ranges)

        def equal(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            start = low_tile + i * share
            return start * tile, jnp.minimum(start + share, end_tile) * tile

        return Ranges(jnp.where(last >= 0, jnp.int32(shape.num_ranges), 0), equal)
    segment = segment_of(low)

    def absolute(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        start, end = segment_start(segment + i), segment_start(segment + (i + 1))
        return jnp.maximum(start, low_tile * tile), jnp.minimum(end, end_tile * tile)

    return Ranges(jnp.maximum(segment_of(last) - segment + 1, 0), absolute)


def attend(shape: TileShape, pages: KVPages, queries: Queries) -> Partial:
    """Over all that the queries see, range by range."""
    ranges = kv_ranges(shape, queries.first, queries.last)
    if shape.num_ranges == 1:
        return attend_range(shape, pages, queries, *ranges.bounds(jnp.int32(0)))

    def visit(i: jax.Array, so_far: Partial) -> Partial:
        return fold(so_far, attend_range(shape, pages, queries, *ranges.bounds(i)))

    return lax.fori_loop(0, ranges.count, visit, empty_partial(queries.q.shape[0], shape.width))


def attend_range(
    shape: TileShape, pages: KVPages, queries: Queries, start: jax.Array, end: jax.Array
) -> Partial:
    """Over the tokens start..end - 1, of which those past queries.last are not read."""

    tile = shape.tiles.kv

    def visit(i: jax.Array, partial: Partial) -> Partial:
        return _attend_tile(shape, pages, queries, i * tile, partial)

    begin = empty_partial(queries.q.shape[0], shape.width)
    return lax.fori_loop(lax.div(start, tile), lax.div(end, tile), visit, begin)


def _attend_tile(
    shape: TileShape, pages: KVPages, queries: Queries, start: jax.Array, partial: Partial
) -> Partial:
    tokens = start + lax.iota(jnp.int32, shape.tiles.kv)
    is_held = tokens <= queries.last
    table: Any = pages.page_table
    page_at = table.at[queries.row, tokens >> (shape.page_size.bit_length() - 1)]
    page = plt.load(page_at, mask=is_held, other=0)
    slot = tokens & (shape.page_size - 1)
    dim = lax.iota(jnp.int32, shape.width)
    is_read = is_held[:, None] & (dim < shape.head_dim)[None, :]

    def kv(ref: Any) -> jax.Array:
        at = ref.at[page[:, None], queries.head, slot[:, None], dim[None, :]]
        return plt.load(at, mask=is_read, other=0)

    def scaled(scales: Any, x: jax.Array) -> jax.Array:
        at = scales.at[page, queries.head, slot]
        return x * plt.load(at, mask=is_held, other=0.0)[None, :]

    scores = _product(queries.q, kv(pages.k_pages).astype(queries.q.dtype).T)
    if pages.k_scales is not None:
        scores = scaled(pages.k_scales, scores)
    scores = _log2_scores(scores, shape.scoring)
    scores = jnp.where(_is_seen(tokens, queries.positions, shape.scoring), scores, MASKED)
    top = jnp.maximum(partial.top, jnp.ceil(jnp.max(scores, axis=1)))
    shrink = _power_of_two(partial.top - top)[:, None]
    # Both sums are over the rounded weights: that one token alone has all the weight stays exact.
    weights = jnp.exp2(scores - top[:, None]).astype(queries.q.dtype)
    ones = jnp.ones((shape.tiles.kv, LANES), queries.q.dtype)
    total = partial.total * shrink + _product(weights, ones)
    if pages.v_scales is not None:
        weights = scaled(pages.v_scales, weights.astype(jnp.float32)).astype(queries.q.dtype)
    values = kv(pages.v_pages)
    if shape.tiles.is_paired and values.dtype == jnp.int8:
        values = _paired(values, queries.q.dtype)
    values = values.astype(queries.q.dtype)
    return Partial(partial.acc * shrink + _product(weights, values), total, top)


def _paired(tile: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The tile [tokens, width] in `dtype`, by way of pairs.

    Else Triton fetches int8 from shared memory in the order of the product's operand, byte by byte,
    before it converts.
    """
    tokens, width = tile.shape
    pairs = jnp.unstack(tile.reshape(tokens, width // 2, 2), axis=-1)
    return jnp.stack([x.astype(dtype) for x in pairs], axis=-1).reshape(tokens, width)


def _log2_scores(products: jax.Array, scoring: Scoring) -> jax.Array:
    """q·k -> scores whose power of two is a token's weight."""
    cap = scoring.soft_cap
    if cap is None:
        return products * (scoring.scale * LOG2_E)
    # tanh(x) = 1 - 2 / (e**(2x) + 1): an approximate instruction does not exist on a CPU.
    power = jnp.exp2(products * (scoring.scale / cap * 2 * LOG2_E))
    return (1.0 - 2.0 / (power + 1.0)) * (cap * LOG2_E)


def _is_seen(tokens: jax.Array, positions: jax.Array, scoring: Scoring) -> jax.Array:
    """bool[rows, tile]."""
    tokens, positions = tokens[None, :], positions[:, None]
    is_seen = tokens <= positions
    return is_seen if scoring.window is None else is_seen & (tokens > positions - scoring.window)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32; of float32 operands in full, for which Triton would take TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent for integers of at most 0, in float32; 0 below the normal numbers."""
    biased = jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)
