"""Attention of queries over KV pages, in the jnp reference form.

One arithmetic for every caller: KV tiles of TILE_KV tokens at absolute positions, visited in order
with an online softmax (FlashAttention-2, arXiv:2307.08691). A query's bits therefore depend on its
own context alone, whether it is one row of a decode step or one of a block of queries in a prefill
step (tests/pallas_kernels).

Queries are taken in groups of blocks, and each group visits only as many tiles as its longest block
needs: both trip counts are dynamic, so no shape depends on a context length.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.row_sum import row_sum

TILE_KV = 128  # tokens; a page size must divide it
NARROW_GROUP = 8  # blocks of one query that are computed together
WIDE_GROUP = 4  # blocks of several queries that are computed together
SMALL_WIDE_GROUP = 2  # the same where blocks are of SMALL_WIDTH queries or fewer: few are real
SMALL_WIDTH = 16
LANES = 16  # running sums of a softmax's weights, added up at the end
LEAST_ROWS = 2  # of one product: XLA CPU computes a single row in another order
HEAD_MULTIPLE = 64  # head dims in between make the blocking of a product depend on its rows
MASKED = -1e30  # a finite stand-in for -inf: exp(MASKED - m) is exactly 0


Array = TypeVar("Array")  # jax.Array on the device, numpy on the host, shapes while lowering


class QueryBlocks(NamedTuple, Generic[Array]):
    """Which tokens of a packed token axis [T] attend together; T marks padding.

    Real blocks stand first. Every token is in at most one block; a token in none gets output 0.
    """

    narrow: Array  # int32[A], A a multiple of NARROW_GROUP: blocks of one query
    num_narrow: Array  # int32[]
    wide: Array  # int32[B, Q], B a multiple of WIDE_GROUP: queries of one row
    num_wide: Array  # int32[]


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """One query per row over that row's pages: a decode step.

    Args:
        q: float[N, H, D], N a multiple of NARROW_GROUP; real rows stand first.
        k_pages, v_pages: float[P, K, S, D]; S divides TILE_KV.
        page_table: int32[N, M]; entries past the row's last page may be any valid page.
        positions: int32[N]: the query's position; it attends to 0..position. -1 marks a padding
            row.
        scale: multiplies q·k, usually D**-0.5.
    Returns: float[N, H, D]; padding rows are 0. Sums are kept in float32.
    Raises: ValueError naming the argument whose shape does not fit.
    """
    _check_backend(backend)
    _check_pages(q, k_pages, v_pages)
    if q.shape[0] % NARROW_GROUP or page_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"q must have a multiple of {NARROW_GROUP} rows and page_table as many; "
            f"got q {q.shape} and page_table {page_table.shape}"
        )
    tokens = jnp.arange(q.shape[0], dtype=jnp.int32)
    return _attend_blocks(
        jnp.zeros_like(q),
        q,
        positions,
        page_table,
        tokens,
        tokens[:, None],
        jnp.sum(positions >= 0, dtype=jnp.int32),
        k_pages,
        v_pages,
        scale=scale,
        group=NARROW_GROUP,
    )


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
    blocks: QueryBlocks[jax.Array],
    *,
    scale: float,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """Packed chunks of several sequences over their pages: a prefill step.

    Args:
        q: float[T, H, D].
        k_pages, v_pages: float[P, K, S, D]; S divides TILE_KV.
        page_table: int32[R, M].
        positions: int32[T]; a token attends to 0..position of its row. -1 marks padding.
        rows: int32[T]: each token's row of page_table.
        blocks: which tokens attend together.
        scale: multiplies q·k, usually D**-0.5.
    Returns: float[T, H, D]; padding tokens are 0. Sums are kept in float32.
    Raises: ValueError naming the argument whose shape does not fit.
    """
    _check_backend(backend)
    _check_pages(q, k_pages, v_pages)
    _check_blocks(blocks)
    out = jnp.zeros_like(q)
    is_small = blocks.wide.shape[1] <= SMALL_WIDTH
    for tokens, count, group in (
        (blocks.narrow[:, None], blocks.num_narrow, NARROW_GROUP),
        (blocks.wide, blocks.num_wide, SMALL_WIDE_GROUP if is_small else WIDE_GROUP),
    ):
        out = _attend_blocks(
            out,
            q,
            positions,
            page_table,
            rows,
            tokens,
            count,
            k_pages,
            v_pages,
            scale=scale,
            group=group,
        )
    return out


def _attend_blocks(
    out: jax.Array,
    q: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    rows: jax.Array,
    blocks: jax.Array,
    num_blocks: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    scale: float,
    group: int,
) -> jax.Array:
    """Writes the outputs of the first num_blocks blocks, int32[B, Q] of tokens, into out [T, H, D].

    Q queries and the H/K heads that share a KV head are the rows of one small product per KV head.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv, page_size, _ = k_pages.shape
    width, shared = blocks.shape[1], num_heads // num_kv
    num_rows = width * shared
    pages_per_tile = TILE_KV // page_size
    pad = -page_table.shape[1] % pages_per_tile
    page_table = jnp.pad(page_table, ((0, 0), (0, pad)))

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

    def tile(pages: jax.Array, ids: jax.Array) -> jax.Array:
        """[P, K, S, D] at int32[G, pages_per_tile] -> float32[G, K, TILE_KV, D]."""
        heads = jnp.arange(num_kv, dtype=jnp.int32)[None, :, None]
        got = pages.at[ids[:, None, :], heads].get(mode="promise_in_bounds")
        got = got.reshape(group, num_kv, TILE_KV, head_dim).astype(jnp.float32)
        return _pad_head(got)

    def attend_group(g: jax.Array, out: jax.Array) -> jax.Array:
        tokens = lax.dynamic_slice_in_dim(blocks, g * group, group)
        at = jnp.minimum(tokens, num_tokens - 1)
        own = jnp.where(tokens < num_tokens, positions[at], -1)
        last, table = own.max(axis=1), page_table[rows[at[:, 0]]]
        q_g = by_head(q[at]) * scale
        extra = q_g.shape[2] - num_rows
        q_positions = jnp.pad(jnp.repeat(own, shared, axis=1), ((0, 0), (0, extra)))

        def visit(t: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = carry
            ids = lax.dynamic_slice_in_dim(table, t * pages_per_tile, pages_per_tile, axis=1)
            kv_positions = t * TILE_KV + jnp.arange(TILE_KV, dtype=jnp.int32)
            k, v = tile(k_pages, ids), tile(v_pages, ids)
            # A reused page may hold anything past this row's end: 0 * NaN would be NaN.
            is_held = kv_positions[None, :] <= last[:, None]
            v = jnp.where(is_held[:, None, :, None], v, 0.0)
            scores = jnp.einsum("gkrd,gkud->gkru", q_g, k)
            is_seen = kv_positions[None, None, :] <= q_positions[:, :, None]
            scores = jnp.where(is_seen[:, None], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            shrink = jnp.exp(top - new_top)
            p = jnp.exp(scores - new_top[..., None])
            total = total * shrink[..., None] + _lane_sums(p)
            acc = acc * shrink[..., None] + jnp.einsum("gkru,gkud->gkrd", p, v)
            return new_top, total, acc

        shape = q_g.shape[:3]
        start = (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros((*shape, LANES), jnp.float32),
            jnp.zeros(q_g.shape, jnp.float32),
        )
        num_tiles = lax.div(last.max() + TILE_KV, TILE_KV)
        _, total, acc = lax.fori_loop(0, num_tiles, visit, start)
        result = by_token(acc / jnp.maximum(row_sum(total), 1e-30)[..., None])
        # Padding tokens have an index past the end, or a position of -1: both are dropped.
        target = jnp.where(own >= 0, tokens, num_tokens)
        return out.at[target].set(result.astype(out.dtype), mode="drop")

    num_groups = lax.div(num_blocks + (group - 1), group)
    return lax.fori_loop(0, num_groups, attend_group, out)


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


def _check_backend(backend: Backend) -> None:
    if backend.form != "reference":
        raise ValueError(f"backend must be of form reference; got {backend}")


def _check_pages(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must have one shape [P, K, S, D]; "
            f"got {k_pages.shape} and {v_pages.shape}"
        )
    _, num_kv, page_size, head_dim = k_pages.shape
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv:
        raise ValueError(
            f"q must be [rows, H, {head_dim}] with H a multiple of {num_kv}; got {q.shape}"
        )
    if TILE_KV % page_size:
        raise ValueError(f"k_pages' page size must divide {TILE_KV}; got {page_size}")


def _check_blocks(blocks: QueryBlocks[jax.Array]) -> None:
    narrow, wide = blocks.narrow.shape[0], blocks.wide.shape[0]
    if narrow % NARROW_GROUP or wide % WIDE_GROUP:
        raise ValueError(
            f"blocks must hold a multiple of {NARROW_GROUP} narrow and {WIDE_GROUP} wide ones; "
            f"got {narrow} and {wide}"
        )
