"""Attention of packed chunks of several sequences over their pages: a prefill step.

The kernel: a program per KV head and run of consecutive queries of a wide block, which goes through
the row's segments one by one. Queries that attend alone go through the decode kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention_arguments import (
    KVPages,
    Scoring,
    check_attention,
    check_kernel,
    check_token_axis,
)
from pallas_kernels.attention_reference import ragged_paged_attention_reference
from pallas_kernels.attention_tile import Queries, TileShape, attend, result
from pallas_kernels.backend import REFERENCE, Backend, attention_tiles
from pallas_kernels.empty_axes import check_not_empty
from pallas_kernels.paged_attention import SingleQueries, attend_single
from pallas_kernels.query_blocks import QueryBlocks, check_blocks

MAX_POSITION = 2**31 - 1


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
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """Packed chunks of several sequences over their pages: a prefill step.

    Args:
        q: float[T, H, D].
        k_pages, v_pages: float or int8 [P, K, S, D]; S divides 128.
        page_table: int32[R, M]; entries past a row's last page may be any valid page.
        positions: int32[T]; a token attends to 0..position of its row. -1 marks padding.
        rows: int32[T]: each token's row of page_table.
        blocks: which tokens attend together.
        scale: multiplies q·k, usually D**-0.5.
        k_scales, v_scales: float32[P, K, S] of int8 pages, None for others.
        window: tokens that a query sees, itself included.
        soft_cap: a score s becomes soft_cap * tanh(s / soft_cap).
    Returns: float[T, H, D]; padding tokens are 0. Sums are kept in float32.
    Raises: ValueError naming the argument that does not fit.
    """
    if backend.form == "reference":
        return ragged_paged_attention_reference(
            q,
            k_pages,
            v_pages,
            page_table,
            positions,
            rows,
            blocks,
            scale=scale,
            k_scales=k_scales,
            v_scales=v_scales,
            window=window,
            soft_cap=soft_cap,
        )
    pages = KVPages(k_pages, v_pages, k_scales, v_scales, page_table)
    scoring = Scoring(scale, window, soft_cap)
    check_attention(q, pages, positions, scoring)
    check_token_axis(q, rows=rows)
    check_blocks(blocks)
    check_kernel(q, pages, scoring)
    check_not_empty(narrow=blocks.narrow, wide=blocks.wide)
    at = jnp.minimum(blocks.narrow, q.shape[0] - 1)
    own = jnp.where(blocks.narrow < q.shape[0], positions[at], -1)
    narrow = SingleQueries(blocks.narrow, rows[at], own)
    out = attend_single(q, pages, narrow, scoring, backend, out=jnp.zeros_like(q))
    return _attend_wide(q, pages, positions, rows, blocks.wide, scoring, backend, out)


def _attend_wide(
    q: jax.Array,
    pages: KVPages,
    positions: jax.Array,
    rows: jax.Array,
    wide: jax.Array,
    scoring: Scoring,
    backend: Backend,
    out: jax.Array,
) -> jax.Array:
    """Writes the outputs of the tokens in `wide`, int32[B, Q], into out [T, H, D]."""
    num_kv, page_size, head_dim = pages.k_pages.shape[1:]
    tiles = attention_tiles(backend, head_dim, q.dtype, pages.k_pages.dtype)
    shared = pl.next_power_of_2(q.shape[1] // num_kv)
    shape = TileShape(
        scoring, tiles, page_size, head_dim, num_ranges=None if backend.is_exact else 1
    )
    run = max(1, tiles.ragged_rows // shared)
    inputs = (q, pages, positions, rows, wide, out)
    return pl.pallas_call(
        partial(_wide_kernel, shape, run, shared),
        grid=(num_kv, pl.cdiv(wide.shape[1], run), wide.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={len(jax.tree.leaves(inputs)) - 1: 0},
        compiler_params=plt.CompilerParams(num_warps=tiles.ragged_warps, num_stages=tiles.stages),
        interpret=backend.form == "interpret",
        name="ragged_paged_attention",
    )(*inputs)


def _wide_kernel(
    shape: TileShape,
    run: int,
    shared: int,
    q: Any,
    pages: KVPages,
    positions: Any,
    rows: Any,
    wide: Any,
    _: Any,
    out: Any,
) -> None:
    """Program (head, j, b): queries j * run ... of block b; row r of the product is one of them
    with one of the `shared` heads, a power of two."""
    head, j, block = (pl.program_id(axis) for axis in range(3))
    block = (wide.shape[0] - 1) - block  # a row's last blocks take longest: they start first
    place = lax.iota(jnp.int32, run * shared)
    i, member = j * run + lax.div(place, shared), lax.rem(place, shared)
    num_members = q.shape[1] // pages.k_pages.shape[1]
    is_real = (i < wide.shape[1]) & (member < num_members)
    token = plt.load(wide.at[block, i], mask=is_real, other=q.shape[0])
    is_real = is_real & (token < q.shape[0])
    own = plt.load(positions.at[token], mask=is_real, other=-1)
    row = jnp.max(plt.load(rows.at[token], mask=is_real, other=0))
    first = jnp.min(jnp.where(own >= 0, own, MAX_POSITION))
    heads, dim = head * num_members + member, lax.iota(jnp.int32, shape.width)
    mask = (own >= 0)[:, None] & (dim < shape.head_dim)[None, :]
    at = (token[:, None], heads[:, None], dim[None, :])
    queries = Queries(plt.load(q.at[at], mask=mask, other=0), own, row, head, first, jnp.max(own))
    got = result(attend(shape, pages, queries)).astype(out.dtype)
    plt.store(out.at[at], got, mask=mask)
