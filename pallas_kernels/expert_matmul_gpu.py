"""Products of a mixture of experts on a GPU: each block of rows by the weight of its own expert.

All experts' weights are one matrix [X*N, K], of which expert e has the rows from e*N on. A tile is
computed as that of a product with one weight (matmul, int8_matmul, int4_matmul, w8a8_matmul), from
the expert's part of the matrix. Tile depth, instructions and the order of a sum follow from the
format and K alone, so that a row's bits depend on neither the other rows, nor its block, nor how
many rows a block has or how many blocks there are. K is not split: blocks of several experts fill
the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend, MatmulTile
from pallas_kernels.int4_matmul import int4_product
from pallas_kernels.int8_matmul import int8_product
from pallas_kernels.matmul import dense_product
from pallas_kernels.split_product import Ref, TiledProduct, plain_zeros, scaled, tile_for
from pallas_kernels.w8a8_matmul import w8a8_product


def expert_matmul(
    x: jax.Array,
    weight: jax.Array,
    experts: jax.Array,
    num_blocks: jax.Array,
    *,
    num_experts: int,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend,
) -> jax.Array:
    """Each block's rows @ its expert's weight.T, summed in float32.

    Args:
        x: bfloat16 or float32 [B*R, K], R rows for each of B blocks.
        weight: [X*N, K], of the dtype of x.
        experts: int32[B], of 0 to X - 1 where the block is used.
        num_blocks: int32[], of the blocks that are used, which stand first. Rows of the others are
            not read and become 0.
        num_experts: X.
        backend: pallas or interpret.
    Returns: out_dtype[B*R, N].
    Raises: ValueError naming the argument whose shape or dtype does not fit.
    """
    blocks = ExpertBlocks(experts, num_blocks, num_experts)
    return _in_blocks(
        "expert_matmul", dense_product(x, weight, backend), blocks, out_dtype, backend
    )


def expert_int8_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    experts: jax.Array,
    num_blocks: jax.Array,
    *,
    num_experts: int,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend,
) -> jax.Array:
    """The same by a weight as of int8_matmul: q int8[X*N, K], scale and zero [G, X*N]."""
    blocks = ExpertBlocks(experts, num_blocks, num_experts)
    product = int8_product(x, q, scale, zero, backend)
    return _in_blocks("expert_int8_matmul", product, blocks, out_dtype, backend)


def expert_int4_matmul(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    experts: jax.Array,
    num_blocks: jax.Array,
    *,
    num_experts: int,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend,
) -> jax.Array:
    """The same by a weight as of int4_matmul: packed int8[X*N, K'/2], scale and zero [G, X*N]."""
    blocks = ExpertBlocks(experts, num_blocks, num_experts)
    product = int4_product(x, packed, scale, zero, backend)
    return _in_blocks("expert_int4_matmul", product, blocks, out_dtype, backend)


def expert_w8a8_matmul(
    xq: jax.Array,
    x_scale: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    experts: jax.Array,
    num_blocks: jax.Array,
    *,
    num_experts: int,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend,
) -> jax.Array:
    """The same of int8 rows and a weight as of w8a8_matmul: q int8[X*N, K], scale [X*N]."""
    blocks = ExpertBlocks(experts, num_blocks, num_experts)
    product = w8a8_product(xq, x_scale, q, scale, backend)
    return _in_blocks("expert_w8a8_matmul", product, blocks, out_dtype, backend)


class ExpertBlocks(NamedTuple):
    """Which expert each block of rows meets."""

    experts: jax.Array  # int32[B]
    num_blocks: jax.Array  # int32[]
    num_experts: int


def _in_blocks(
    name: str, product: TiledProduct, blocks: ExpertBlocks, out_dtype: DTypeLike, backend: Backend
) -> jax.Array:
    _check(product, blocks)
    num_rows, num_outputs = product.shape
    size = num_rows // len(blocks.experts), num_outputs // blocks.num_experts
    tile = tile_for(product.tiles, size[0])
    row_tiles, col_tiles = pl.cdiv(size[0], tile.rows), pl.cdiv(size[1], tile.cols)
    return pl.pallas_call(
        partial(_kernel, product, size, tile),
        grid=(len(blocks.experts), row_tiles, col_tiles),
        out_shape=jax.ShapeDtypeStruct((num_rows, size[1]), out_dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=backend.form == "interpret",
        name=name,
    )(
        blocks.experts,
        blocks.num_blocks.reshape(1),
        list(product.operands),
        product.scales,
    )


def _kernel(
    product: TiledProduct,
    size: tuple[int, int],
    tile: MatmulTile,
    experts: Ref,
    num_blocks: Ref,
    operands: Sequence[Ref],
    scales: Sequence[Ref],
    out: Ref,
) -> None:
    """Program (b, i, j): tile i of the rows and tile j of the columns of block b.

    Args:
        size: rows and columns of a block, R and N.
    """
    block, num_rows = pl.program_id(0), product.shape[0]
    own = pl.program_id(1) * tile.rows + lax.iota(jnp.int32, tile.rows)
    # Past the last row, not in the next block: nothing is loaded or stored there.
    rows = jnp.where(own < size[0], block * size[0] + own, num_rows + own)
    cols = pl.program_id(2) * tile.cols + lax.iota(jnp.int32, tile.cols)
    is_inside = (rows < num_rows)[:, None] & (cols < size[1])[None, :]

    def store(total: jax.Array) -> None:
        plt.store(out.at[rows[:, None], cols[None, :]], total.astype(out.dtype), mask=is_inside)

    is_used = block < plt.load(num_blocks.at[jnp.int32(0)])

    @pl.when(is_used)
    def _() -> None:
        outputs = plt.load(experts.at[block]) * size[1] + cols
        row, col = product.loaded_scales(scales, rows, outputs)
        end = jnp.int32(product.num_steps)
        total = product.partial(operands, rows, outputs, jnp.int32(0), end)
        store(scaled(plain_zeros(total), row, col))

    @pl.when(~is_used)
    def _() -> None:
        store(jnp.zeros((tile.rows, tile.cols), jnp.float32))


def _check(product: TiledProduct, blocks: ExpertBlocks) -> None:
    (num_rows, num_outputs), (experts, num_blocks, num_experts) = product.shape, blocks
    for name, array, wanted in (
        ("experts", experts, "int32[B]"),
        ("num_blocks", num_blocks, "int32[]"),
    ):
        if array.ndim != wanted.count("B") or array.dtype != jnp.int32:
            raise ValueError(f"{name} must be {wanted}; got {array.dtype} {array.shape}")
    if not len(experts) or num_rows % len(experts):
        raise ValueError(
            f"x must have the same number of rows for each block; got {num_rows} for experts "
            f"{experts.shape}"
        )
    if num_experts < 1 or num_outputs % num_experts:
        raise ValueError(
            f"num_experts must divide the outputs of the weight, {num_outputs}; got {num_experts}"
        )
