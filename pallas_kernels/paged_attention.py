"""Attention of one query per row over that row's pages: a decode step.

The kernel: a program per row, KV head and share of the row's KV. Where rows are few, the shares of
a row are computed apart and a second kernel adds them up, in their order; where they are many, a
program goes through all of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention_arguments import (
    KVPages,
    Scoring,
    check_attention,
    check_decode_rows,
    check_kernel,
)
from pallas_kernels.attention_reference import paged_attention_reference
from pallas_kernels.attention_segments import most_segments
from pallas_kernels.attention_tile import (
    LOWEST_TOP,
    Partial,
    Queries,
    TileShape,
    attend,
    attend_range,
    empty_partial,
    fold,
    kv_ranges,
    result,
)
from pallas_kernels.backend import REFERENCE, Backend, attention_tiles

BATCH = 8  # partial results that are loaded together


def paged_attention(
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
    backend: Backend = REFERENCE,
) -> jax.Array:
    """One query per row over that row's pages: a decode step.

    Args:
        q: float[N, H, D], N a multiple of NARROW_GROUP; real rows stand first.
        k_pages, v_pages: float or int8 [P, K, S, D]; S divides 128.
        page_table: int32[N, M]; entries past the row's last page may be any valid page.
        positions: int32[N]: the query's position; it attends to 0..position. -1 marks a padding
            row.
        scale: multiplies q·k, usually D**-0.5.
        k_scales, v_scales: float32[P, K, S] of int8 pages, None for others.
        window: tokens that a query sees, itself included.
        soft_cap: a score s becomes soft_cap * tanh(s / soft_cap).
    Returns: float[N, H, D]; padding rows are 0. Sums are kept in float32.
    Raises: ValueError naming the argument that does not fit.
    """
    if backend.form == "reference":
        return paged_attention_reference(
            q,
            k_pages,
            v_pages,
            page_table,
            positions,
            scale=scale,
            k_scales=k_scales,
            v_scales=v_scales,
            window=window,
            soft_cap=soft_cap,
        )
    pages = KVPages(k_pages, v_pages, k_scales, v_scales, page_table)
    scoring = Scoring(scale, window, soft_cap)
    check_decode_rows(q, page_table)
    check_attention(q, pages, positions, scoring)
    check_kernel(q, pages, scoring)
    queries = SingleQueries(None, None, positions)
    return attend_single(q, pages, queries, scoring, backend, out=None)


class SingleQueries(NamedTuple):
    """Queries that attend alone; a kernel holds references to the same.

    Without tokens and rows, query i is q[i] and has row i of the page table. (Numbers that say so
    would be a launch of their own in each layer.)
    """

    tokens: jax.Array | None  # int32[A]: their places in q and the output; past the end: padding
    rows: jax.Array | None  # int32[A]: of the page table
    positions: jax.Array  # int32[A]; -1: padding

    def token(self, i: jax.Array) -> jax.Array:
        return i if self.tokens is None else self.tokens[i]

    def row(self, i: jax.Array) -> jax.Array:
        return i if self.rows is None else self.rows[i]


def attend_single(
    q: jax.Array,
    pages: KVPages,
    queries: SingleQueries,
    scoring: Scoring,
    backend: Backend,
    *,
    out: jax.Array | None,
) -> jax.Array:
    """float[T, H, D]: attention of these queries, written into `out` if that is given.

    Without `out`, every token of q must be among the queries.
    """
    num_kv, page_size, head_dim = pages.k_pages.shape[1:]
    tiles = attention_tiles(backend, head_dim, q.dtype, pages.k_pages.dtype)
    num_programs = queries.positions.shape[0] * num_kv
    num_tokens = pages.page_table.shape[1] * page_size
    most = most_segments(num_tokens, scoring.window)
    splits = max(1, min(most, tiles.decode_programs // num_programs))
    shape = TileShape(
        scoring, tiles, page_size, head_dim, num_ranges=None if backend.is_exact else splits
    )
    is_interpreted = backend.form == "interpret"
    if splits == 1:
        return _whole(q, pages, queries, shape, out, is_interpreted)
    num_ranges = shape.num_ranges or most
    partials = _split(q, pages, queries, shape, (splits, num_ranges), is_interpreted)
    return _folded(q, partials, queries, shape, out, is_interpreted)


def _whole(
    q: jax.Array,
    pages: KVPages,
    queries: SingleQueries,
    shape: TileShape,
    out: jax.Array | None,
    is_interpreted: bool,
) -> jax.Array:
    """One program computes all of a query's output for one KV head."""
    inputs = (q, pages, queries) if out is None else (q, pages, queries, out)
    last = len(jax.tree.leaves(inputs)) - 1
    return pl.pallas_call(
        partial(_whole_kernel, shape),
        grid=(pages.k_pages.shape[1], len(queries.positions)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={} if out is None else {last: 0},
        compiler_params=_decode_params(shape),
        interpret=is_interpreted,
        name="paged_attention",
    )(*inputs)


def _decode_params(shape: TileShape) -> plt.CompilerParams:
    tiles = shape.tiles
    return plt.CompilerParams(num_warps=tiles.decode_warps, num_stages=tiles.stages)


def _whole_kernel(
    shape: TileShape, q: Any, pages: KVPages, queries: SingleQueries, *outs: Any
) -> None:
    head, i = pl.program_id(0), pl.program_id(1)
    own = _own_queries(shape, q, pages, queries, head, i)
    heads, is_real = _heads(shape, q, pages, head)
    dim = lax.iota(jnp.int32, shape.width)
    token, out = queries.token(i), outs[-1]
    mask = (is_real & (token < q.shape[0]))[:, None] & (dim < shape.head_dim)[None, :]
    got = result(attend(shape, pages, own)).astype(out.dtype)
    plt.store(out.at[token, heads[:, None], dim[None, :]], got, mask=mask)


def _own_queries(
    shape: TileShape, q: Any, pages: KVPages, queries: SingleQueries, head: jax.Array, i: jax.Array
) -> Queries:
    """The heads of query i that share a KV head."""
    heads, is_real = _heads(shape, q, pages, head)
    dim = lax.iota(jnp.int32, shape.width)
    token, position = queries.token(i), queries.positions[i]
    mask = (is_real & (token < q.shape[0]))[:, None] & (dim < shape.head_dim)[None, :]
    rows = plt.load(q.at[token, heads[:, None], dim[None, :]], mask=mask, other=0)
    positions = jnp.full(heads.shape, position)
    return Queries(rows, positions, queries.row(i), head, position, position)


def _heads(
    shape: TileShape, q: Any, pages: KVPages, head: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The query heads of a KV head, and which rows of a product are theirs."""
    shared = q.shape[1] // pages.k_pages.shape[1]
    place = lax.iota(jnp.int32, max(shape.tiles.decode_rows, pl.next_power_of_2(shared)))
    return head * shared + place, place < shared


def _split(
    q: jax.Array,
    pages: KVPages,
    queries: SingleQueries,
    shape: TileShape,
    counts: tuple[int, int],
    is_interpreted: bool,
) -> Partial:
    """The partial results of every query's ranges: [A, H, ranges, D], twice [A, H, ranges].

    Args:
        counts: programs for one query and KV head; most ranges that a query has.
    """
    splits, num_ranges = counts
    stats = (len(queries.positions), q.shape[1], num_ranges)
    out_shape = [
        jax.ShapeDtypeStruct(of, jnp.float32) for of in ((*stats, q.shape[2]), stats, stats)
    ]
    found = pl.pallas_call(
        partial(_split_kernel, shape, splits),
        grid=(pages.k_pages.shape[1], splits, len(queries.positions)),
        out_shape=out_shape,
        compiler_params=_decode_params(shape),
        interpret=is_interpreted,
        name="paged_attention_split",
    )(q, pages, queries)
    return Partial(*found)


def _split_kernel(
    shape: TileShape, splits: int, q: Any, pages: KVPages, queries: SingleQueries, *outs: Any
) -> None:
    """Program (head, c, i) computes the ranges c, c + splits, ... of query i."""
    head, c, i = (pl.program_id(axis) for axis in range(3))
    own = _own_queries(shape, q, pages, queries, head, i)
    heads, is_real = _heads(shape, q, pages, head)
    dim = lax.iota(jnp.int32, shape.width)
    ranges = kv_ranges(shape, own.first, own.last)
    out: Any = Partial(*outs)

    def visit(turn: jax.Array, carry: None) -> None:
        at = c + turn * splits
        found = attend_range(shape, pages, own, *ranges.bounds(at))
        mask = is_real[:, None] & (dim < shape.head_dim)[None, :]
        plt.store(out.acc.at[i, heads[:, None], at, dim[None, :]], found.acc, mask=mask)
        plt.store(out.total.at[i, heads, at], jnp.max(found.total, axis=1), mask=is_real)
        plt.store(out.top.at[i, heads, at], found.top, mask=is_real)
        return carry

    turns = lax.div(jnp.maximum(ranges.count - c, 0) + (splits - 1), splits)
    lax.fori_loop(0, turns, visit, None)


def _folded(
    q: jax.Array,
    partials: Partial,
    queries: SingleQueries,
    shape: TileShape,
    out: jax.Array | None,
    is_interpreted: bool,
) -> jax.Array:
    """Adds up every query's partial results and writes its output."""
    inputs = (partials, queries) if out is None else (partials, queries, out)
    last = len(jax.tree.leaves(inputs)) - 1
    return pl.pallas_call(
        partial(_fold_kernel, shape),
        grid=(q.shape[1], len(queries.positions)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={} if out is None else {last: 0},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=is_interpreted,
        name="paged_attention_fold",
    )(*inputs)


def _fold_kernel(shape: TileShape, partials: Any, queries: SingleQueries, *outs: Any) -> None:
    """Program (head, i): in the order of the ranges, BATCH of them loaded at once."""
    head, i = pl.program_id(0), pl.program_id(1)
    dim = lax.iota(jnp.int32, shape.width)
    token, position, out = queries.token(i), queries.positions[i], outs[-1]
    count = kv_ranges(shape, position, position).count

    def visit(batch: jax.Array, so_far: Partial) -> Partial:
        for j in range(BATCH):
            at = batch * BATCH + j
            is_there = at < count
            at = jnp.minimum(at, partials.top.shape[2] - 1)
            acc = plt.load(
                partials.acc.at[i, head, at, dim],
                mask=(dim < shape.head_dim) & is_there,
                other=0.0,
            )
            total = jnp.where(is_there, partials.total[i, head, at], 0.0)
            top = jnp.where(is_there, partials.top[i, head, at], LOWEST_TOP)
            so_far = fold(
                so_far, Partial(acc[None, :], jnp.full((1, 1), total), jnp.full((1,), top))
            )
        return so_far

    num_batches = lax.div(count + (BATCH - 1), BATCH)
    found = lax.fori_loop(0, num_batches, visit, empty_partial(1, shape.width, lanes=1))
    mask = (dim < shape.head_dim) & (token < out.shape[0])
    got = result(found).astype(out.dtype).reshape(shape.width)
    plt.store(out.at[token, head, dim], got, mask=mask)
