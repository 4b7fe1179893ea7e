"""A product x [M, K] @ weight [N, K].T as a grid of tiles, with K in splits at fixed places.

How many splits there are follows from N and K alone, never from the number of rows, and partial
sums are added in order. Few rows: each split is a block of the grid, so that a product of few tiles
fills the GPU, and XLA adds the partial sums. Many rows: a block computes all splits of its tile and
adds them itself. Both make the same additions, so a row has the same bits either way.

What a tile is multiplied from is the caller's (matmul, int8_matmul, int4_matmul, w8a8_matmul), and
the same in a mixture of experts (expert_matmul_gpu).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels.backend import MATMUL_BLOCKS, Backend, MatmulTile

LEAST_SPLIT = 256  # elements of K: shorter sums do not pay for a partial sum
MOST_SPLITS = 16

Ref = Any  # a Pallas reference; its type is not public
Partial = Callable[[Sequence[Ref], jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(operands, rows int32[BM], cols int32[BN], first step, end step) -> [BM, BN], the sum over these
steps of K. Rows of x or of the weight past the last are 0."""


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """How tiles of a product are computed."""

    partial: Partial  # one tile's sum over some steps, of sum_dtype
    operands: Sequence[jax.Array]
    shape: tuple[int, int]  # (M, N)
    tiles: Sequence[MatmulTile]  # by rising number of rows
    num_steps: int  # that K takes, of depth elements
    depth: int
    row_scale: jax.Array | None = None  # float32[1, M]
    col_scale: jax.Array | None = None  # float32[1, N]
    sum_dtype: DTypeLike = jnp.float32

    @property
    def scales(self) -> list[jax.Array]:
        """Those that there are."""
        return [scale for scale in (self.row_scale, self.col_scale) if scale is not None]

    def loaded_scales(
        self, refs: Sequence[Ref], rows: jax.Array, cols: jax.Array
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """In a program, of its rows and columns."""
        left = iter(refs)
        row = None if self.row_scale is None else load_line(next(left), 0, rows)
        col = None if self.col_scale is None else load_line(next(left), 0, cols)
        return row, col


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How a product is cut up: all of it static."""

    tile: MatmulTile
    num_rows: int  # M
    num_cols: int  # N
    num_steps: int  # of tile depth, that K takes
    split_steps: int  # per split; the last one may have fewer
    is_in_grid: bool  # each split is a block of the grid

    @property
    def num_splits(self) -> int:
        return pl.cdiv(self.num_steps, self.split_steps)


def plan_product(
    choices: Sequence[MatmulTile],
    shape: tuple[int, int],
    num_steps: int,
    depth: int,
    backend: Backend,
) -> SplitPlan:
    """The tile for this many rows, and splits that do not depend on them.

    Args:
        choices: tiles by rising number of rows.
        shape: (M, N).
        num_steps, depth: K takes num_steps steps of depth elements.
        backend: one that is not exact splits only where the rows leave the GPU idle.
    """
    num_rows, num_cols = shape
    tile = tile_for(choices, num_rows)
    blocks = MATMUL_BLOCKS[backend.gpu]
    num_tiles = pl.cdiv(num_rows, tile.rows) * pl.cdiv(num_cols, tile.cols)
    one_row_of_tiles = pl.cdiv(num_cols, choices[0].cols)
    wanted = blocks // (one_row_of_tiles if backend.is_exact else num_tiles)
    wanted = max(1, min(wanted, num_steps * depth // LEAST_SPLIT, MOST_SPLITS))
    split_steps = pl.cdiv(num_steps, wanted)
    # Many tiles fill the GPU, and their partial sums would be long.
    is_few = not backend.is_exact or num_tiles <= max(one_row_of_tiles, blocks // 4)
    is_in_grid = split_steps < num_steps and is_few
    return SplitPlan(tile, num_rows, num_cols, num_steps, split_steps, is_in_grid)


def tile_for(choices: Sequence[MatmulTile], num_rows: int) -> MatmulTile:
    """The first that holds them, or else the last."""
    return next((tile for tile in choices if tile.rows >= num_rows), choices[-1])


def split_product(
    product: TiledProduct, *, out_dtype: DTypeLike, backend: Backend, name: str
) -> jax.Array:
    """[M, N] of out_dtype: the splits' sums, in order, times the scales."""
    plan = plan_product(product.tiles, product.shape, product.num_steps, product.depth, backend)
    tile, in_grid = plan.tile, plan.num_splits if plan.is_in_grid else 1

    def kernel(operands: Sequence[Ref], scales: Sequence[Ref], out: Ref) -> None:
        rows = pl.program_id(0) * tile.rows + lax.iota(jnp.int32, tile.rows)
        cols = pl.program_id(1) * tile.cols + lax.iota(jnp.int32, tile.cols)
        is_inside = (rows < plan.num_rows)[:, None] & (cols < plan.num_cols)[None, :]

        def split(number: jax.Array) -> jax.Array:
            first = number * plan.split_steps
            end = first + plan.split_steps
            if plan.num_steps % plan.split_steps:
                end = jnp.minimum(end, plan.num_steps)
            return plain_zeros(product.partial(operands, rows, cols, first, end))

        def all_splits() -> jax.Array:
            if plan.num_splits == 1:
                return split(jnp.int32(0))
            # -0.0 + x has x's bits.
            nothing = jnp.full((tile.rows, tile.cols), -0.0, product.sum_dtype)
            return lax.fori_loop(0, plan.num_splits, lambda s, total: total + split(s), nothing)

        if plan.is_in_grid:
            number = pl.program_id(2)
            at = out.at[(number * plan.num_rows + rows)[:, None], cols[None, :]]
            plt.store(at, split(number), mask=is_inside)
            return
        row, col = product.loaded_scales(scales, rows, cols)
        total = scaled(all_splits(), row, col).astype(out.dtype)
        plt.store(out.at[rows[:, None], cols[None, :]], total, mask=is_inside)

    result = pl.pallas_call(
        kernel,
        grid=(
            pl.cdiv(plan.num_rows, tile.rows),
            pl.cdiv(plan.num_cols, tile.cols),
            in_grid,
        ),
        out_shape=jax.ShapeDtypeStruct(
            (in_grid * plan.num_rows, plan.num_cols),
            product.sum_dtype if plan.is_in_grid else out_dtype,
        ),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=backend.form == "interpret",
        name=name,
    )(list(product.operands), [] if plan.is_in_grid else product.scales)
    if not plan.is_in_grid:
        return result
    total = result[: plan.num_rows]
    for start in range(plan.num_rows, in_grid * plan.num_rows, plan.num_rows):
        total = total + result[start : start + plan.num_rows]
    row = None if product.row_scale is None else product.row_scale[0]
    col = None if product.col_scale is None else product.col_scale[0]
    return scaled(total, row, col).astype(out_dtype)


def plain_zeros(total: jax.Array) -> jax.Array:
    """Without -0: on Hopper a first product that is unrolled has nothing to be added to, one in a
    loop is added to 0, and so the sign of a sum of zeros would follow the number of steps.
    """
    return jnp.where(total == 0, jnp.zeros_like(total), total)


def load_tile(ref: Ref, rows: jax.Array, cols: jax.Array, limit: int | None) -> jax.Array:
    """[rows, cols] of a matrix; rows past its last and columns from `limit` on are 0.

    Args:
        limit: None where all of cols are within the matrix.
    """
    is_inside = (rows < ref.shape[0])[:, None]
    if limit is not None:
        is_inside = is_inside & (cols < limit)[None, :]
    is_inside = jnp.broadcast_to(is_inside, (rows.size, cols.size))
    return plt.load(ref.at[rows[:, None], cols[None, :]], mask=is_inside, other=0)


def load_line(ref: Ref, row: jax.Array | int, cols: jax.Array) -> jax.Array:
    """One row of a matrix; columns past its last are 0."""
    at = ref.at[jnp.full(cols.shape, row, jnp.int32), cols]
    return plt.load(at, mask=cols < ref.shape[1], other=0)


def add_step(
    total: jax.Array,
    operands: Sequence[Ref],
    rows: jax.Array,
    cols: jax.Array,
    number: jax.Array,
    depth: int,
    zeros: Sequence[jax.Array] = (),
) -> jax.Array:
    """total [BM, BN] and the product of step `number` of K, of depth elements.

    Args:
        operands: x [M, K], and a weight [N, K] whose numbers the dtype of x has exactly.
        zeros: at most one int8[BN], the step's zero points; bfloat16 has the differences exactly.
    """
    x_ref, weight_ref = operands
    k = x_ref.shape[1]
    limit = k if k % depth else None
    ks = number * depth + lax.iota(jnp.int32, depth)
    x_tile = load_tile(x_ref, rows, ks, limit)
    weight = load_tile(weight_ref, cols, ks, limit).astype(x_ref.dtype)
    for zero in zeros:
        weight = weight - zero.astype(x_ref.dtype)[:, None]
    return total + product(x_tile, weight, total.dtype)


def sum_groups(
    part: Callable[[jax.Array, Sequence[jax.Array]], jax.Array],
    lines: Sequence[Ref],
    rows: jax.Array,
    cols: jax.Array,
    first: jax.Array,
    end: jax.Array,
) -> jax.Array:
    """float32[BM, BN]: the sum over groups from first to end of part(group, its lines) times the
    last of these.

    The compiler loads tiles ahead of their products, but lines, which are scales and zero points,
    only when they are used. Here they are loaded one group early; two would keep it from pipelining
    the loop (jax 0.10.2 to 0.12).
    """

    def load(group: jax.Array) -> list[jax.Array]:
        return [load_line(ref, jnp.minimum(group, ref.shape[0] - 1), cols) for ref in lines]

    def step(group: jax.Array, carry: tuple[jax.Array, list[jax.Array]]) -> Any:
        total, now = carry
        later = load(group + 1)
        return total + part(group, now) * now[-1][None, :], later

    nothing = jnp.zeros((rows.size, cols.size), jnp.float32)
    return lax.fori_loop(first, end, step, (nothing, load(first)))[0]


def product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x @ weight.T; of float32 without rounding to TF32."""
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.dtype(out_dtype),
    )


def scaled(total: jax.Array, row: jax.Array | None, col: jax.Array | None) -> jax.Array:
    """total [M, N] times row [M] and col [N], in float32; 0 where col is 0.

    The product stands behind a select: an addition that follows, such as a bias, cannot be fused
    with it into one multiply-add, which one program would do and another not.
    """
    total = total.astype(jnp.float32)
    if row is not None:
        total = total * row[:, None]
    if col is not None:
        total = jnp.where(col[None, :] == 0, 0.0, total * col[None, :])
    return total
