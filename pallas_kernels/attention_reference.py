"""Attention of queries over KV pages, in the jnp reference form.

One arithmetic for every caller: KV tiles of TILE_KV tokens at absolute positions, visited in order
with an online softmax (FlashAttention-2, arXiv:2307.08691). A query's bits therefore depend on its
own context alone, whether it is one row of a decode step or one of a block of queries in a prefill
step (tests/pallas_kernels).

Queries are taken in groups of blocks, and each group visits only as many tiles as its longest block
needs: both trip counts are dynamic, so no shape depends on a context length.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_arguments import (
    TILE_KV,
    KVPages,
    Scoring,
    check_attention,
    check_decode_rows,
    check_token_axis,
)
from pallas_kernels.query_blocks import NARROW_GROUP, WIDE_GROUP, QueryBlocks, check_blocks
from pallas_kernels.row_sum import row_sum

LANES = 16  # running sums of a softmax's weights, added up at the end
LEAST_ROWS = 2  # of one product: XLA CPU computes a single row in another order
HEAD_MULTIPLE = 64  # head dims in between make the blocking of a product depend on its rows
MAX_POSITION = 2**31 - 1
MASKED = -1e30  # a finite stand-in for -inf: exp(MASKED - m) is exactly 0


def paged_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """As paged_attention; `scale` may be an array here."""
    pages = KVPages(k_pages, v_pages, k_scales, v_scales, page_table)
    scoring = Scoring(scale, window, soft_cap)
    check_decode_rows(q, page_table)
    check_attention(q, pages, positions, scoring)
    tokens = jnp.arange(q.shape[0], dtype=jnp.int32)
    num_real = jnp.sum(positions >= 0, dtype=jnp.int32)
    queries = _Queries(q, positions, tokens)
    return _attend_blocks(
        jnp.zeros_like(q), queries, tokens[:, None], num_real, pages, scoring, group=NARROW_GROUP
    )


def ragged_paged_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
    blocks: QueryBlocks[jax.Array],
    *,
    scale: float,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """As ragged_paged_attention; `scale` may be an array here."""
    pages = KVPages(k_pages, v_pages, k_scales, v_scales, page_table)
    scoring = Scoring(scale, window, soft_cap)
    check_attention(q, pages, positions, scoring)
    check_token_axis(q, rows=rows)
    check_blocks(blocks)
    queries = _Queries(q, positions, rows)
    out = jnp.zeros_like(q)
    for tokens, count, group in (
        (blocks.narrow[:, None], blocks.num_narrow, NARROW_GROUP),
        (blocks.wide, blocks.num_wide, WIDE_GROUP),
    ):
        out = _attend_blocks(out, queries, tokens, count, pages, scoring, group=group)
    return out


class _Queries(NamedTuple):
    q: jax.Array  # float[T, H, D]
    positions: jax.Array  # int32[T]
    rows: jax.Array  # int32[T]


def _attend_blocks(
    out: jax.Array,
    queries: _Queries,
    blocks: jax.Array,
    num_blocks: jax.Array,
    pages: KVPages,
    scoring: Scoring,
    *,
    group: int,
) -> jax.Array:
    """Writes the outputs of the first num_blocks blocks, int32[B, Q] of tokens, into out [T, H, D].

    Q queries and the H/K heads that share a KV head are the rows of one small product per KV head.
    """
    q, positions, rows = queries
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv, page_size, _ = pages.k_pages.shape
    width, shared = blocks.shape[1], num_heads // num_kv
    num_rows = width * shared
    parts = max(1, page_size // TILE_KV)  # of a page, each within one tile
    parts_per_tile = max(1, TILE_KV // page_size)
    pad = -pages.page_table.shape[1] % parts_per_tile
    page_table = jnp.pad(pages.page_table, ((0, 0), (0, pad)))

    def by_head(x: jax.Array) -> jax.Array:
        """[G, Q, H, D] -> float32[G, K, rows, padded D], rows = Q * shared or LEAST_ROWS."""
        x = x.astype(jnp.float32).reshape(group, width, num_kv, shared, head_dim)
        x = x.transpose(0, 2, 1, 3, 4).reshape(group, num_kv, num_rows, head_dim)
        extra = max(0, LEAST_ROWS - num_rows)
        return _pad_head(jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))))

    def by_token(x: jax.Array) -> jax.Array:
        """The way back: [G, K, rows, padded D] -> [G, Q, H, D]."""
        x = x[:, :, :num_rows, :head_dim].reshape(group, num_kv, width, shared, head_dim)
        return x.transpose(0, 2, 1, 3, 4).reshape(group, width, num_heads, head_dim)

    def tile(pool: jax.Array, ids: jax.Array, t: jax.Array) -> jax.Array:
        """Tile t of [P, K, S, ...] at its pages int32[G, 1 or more] -> float32[G, K, TILE_KV, ...].

        One index for a head's slots of a page: XLA CPU copies faster than with an index per axis.
        """
        heads = jnp.arange(num_kv, dtype=jnp.int32)[None, :, None]
        rows = (ids[:, None, :] * num_kv + heads) * parts + t % parts
        got = pool.reshape(pool.shape[0] * num_kv * parts, -1)
        got = got.at[rows].get(mode="promise_in_bounds")
        return got.reshape(group, num_kv, TILE_KV, *pool.shape[3:]).astype(jnp.float32)

    def attend_group(g: jax.Array, out: jax.Array) -> jax.Array:
        tokens = lax.dynamic_slice_in_dim(blocks, g * group, group)
        at = jnp.minimum(tokens, num_tokens - 1)
        own = jnp.where(tokens < num_tokens, positions[at], -1)
        last, table = own.max(axis=1), page_table[rows[at[:, 0]]]
        q_g = by_head(q[at]) * scoring.scale
        extra = q_g.shape[2] - num_rows
        q_positions = jnp.pad(jnp.repeat(own, shared, axis=1), ((0, 0), (0, extra)))

        def visit(t: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = carry
            first_page = lax.div(t * parts_per_tile, parts)
            ids = lax.dynamic_slice_in_dim(table, first_page, parts_per_tile, axis=1)
            kv_positions = t * TILE_KV + jnp.arange(TILE_KV, dtype=jnp.int32)
            k, v = (_pad_head(tile(pool, ids, t)) for pool in (pages.k_pages, pages.v_pages))
            # A reused page may hold anything past this row's end: 0 * NaN would be NaN.
            is_held = kv_positions[None, :] <= last[:, None]
            # (Of k too, whose scores are masked: XLA CPU copies pages faster through a select.)
            k, v = (_held(x, is_held[:, None, :, None]) for x in (k, v))
            scores = jnp.einsum("gkrd,gkud->gkru", q_g, k)
            if pages.k_scales is not None:
                scores = scores * tile(pages.k_scales, ids, t)[:, :, None, :]
            if scoring.soft_cap is not None:
                scores = jnp.tanh(scores / scoring.soft_cap) * scoring.soft_cap
            is_seen = _is_seen(kv_positions, q_positions, scoring.window)
            scores = jnp.where(is_seen[:, None], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            shrink = jnp.exp(top - new_top)
            p = jnp.exp(scores - new_top[..., None])
            if scoring.window is not None:  # the first tiles may hold nothing that a query sees
                p = jnp.where(is_seen[:, None], p, 0.0)
            total = total * shrink[..., None] + _lane_sums(p)
            if pages.v_scales is not None:
                p = p * _held(tile(pages.v_scales, ids, t), is_held[:, None])[:, :, None, :]
            acc = acc * shrink[..., None] + jnp.einsum("gkru,gkud->gkrd", p, v)
            return new_top, total, acc

        shape = q_g.shape[:3]
        start = (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros((*shape, LANES), jnp.float32),
            jnp.zeros(q_g.shape, jnp.float32),
        )
        first_tile, num_tiles = 0, lax.div(last.max() + TILE_KV, TILE_KV)
        if scoring.window is not None:
            lowest = jnp.where(own >= 0, own, MAX_POSITION).min() - (scoring.window - 1)
            first_tile = lax.div(jnp.maximum(lowest, 0), TILE_KV)
        _, total, acc = lax.fori_loop(first_tile, num_tiles, visit, start)
        result = by_token(acc / jnp.maximum(row_sum(total), 1e-30)[..., None])
        # Padding tokens have an index past the end, or a position of -1: both are dropped.
        target = jnp.where(own >= 0, tokens, num_tokens)
        return out.at[target].set(result.astype(out.dtype), mode="drop")

    num_groups = lax.div(num_blocks + (group - 1), group)
    return lax.fori_loop(0, num_groups, attend_group, out)


def _is_seen(kv_positions: jax.Array, q_positions: jax.Array, window: int | None) -> jax.Array:
    """int32[TILE_KV], int32[G, rows] -> bool[G, rows, TILE_KV]."""
    kv_positions, q_positions = kv_positions[None, None, :], q_positions[:, :, None]
    is_seen = kv_positions <= q_positions
    return is_seen if window is None else is_seen & (kv_positions > q_positions - window)


def _held(x: jax.Array, is_held: jax.Array) -> jax.Array:
    return jnp.where(is_held, x, 0.0)


def _lane_sums(p: jax.Array) -> jax.Array:
    """float[..., TILE_KV] -> float[..., LANES], by additions of whole slices.

    A reduction here would be fused with the multiply and add that follow, differently for few and
    for many rows.
    """
    lanes = p[..., :LANES]
    for start in range(LANES, TILE_KV, LANES):
        lanes = lanes + p[..., start : start + LANES]
    return lanes


def _pad_head(x: jax.Array) -> jax.Array:
    """Zeros behind the last axis up to a multiple of HEAD_MULTIPLE."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % HEAD_MULTIPLE)])
