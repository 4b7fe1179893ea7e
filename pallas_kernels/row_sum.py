"""A sum over the last axis whose bits do not depend on how many rows there are.

XLA CPU sums a reduction of fewer than 4096 elements in another order than a larger one (measured on
jax 0.10.2 and 0.12, tests/pallas_kernels/test_row_sum.py). Where the fewest rows that a caller ever
has stay below that, the row is folded by halves instead: additions of whole slices, in an order
that the source fixes. Long rows keep the compiler's reduction, which is faster.

XLA's GPU compiler chooses the order from the whole shape, so the kernel form sums blocks of a fixed
width at fixed places of the row, one program for each, and then these sums the same way.

Do not follow it with a product and an addition: the compiler may fuse all of it, and whether they
become one fused multiply-add then depends on the number of rows (seen on jax 0.10.2, whose CPU
compiler drops optimization barriers before it fuses).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import REFERENCE, ROW_TILES, Backend
from pallas_kernels.empty_axes import check_not_empty

SAME_ORDER_FROM = 4096  # elements


def row_sum(x: jax.Array, *, least_rows: int = 1, backend: Backend = REFERENCE) -> jax.Array:
    """float[..., D] -> float[...].

    Args:
        least_rows: rows (elements of the leading axes) of the smallest array that any program
            reduces in this place; all callers that must agree give the same number. 1: always
            fold. Of the reference form.
    Raises: ValueError naming x where it is not for the kernel.
    """
    if backend.form == "reference":
        return row_sum_reference(x, least_rows=least_rows)
    if x.dtype != jnp.float32 or x.ndim == 0:
        raise ValueError(f"x must be float32[..., D]; got {x.dtype}{list(x.shape)}")
    check_not_empty(x=x)
    sums = x.reshape(-1, x.shape[-1])
    while sums.shape[1] > 1:
        sums = _block_sums(sums, backend)
    return sums.reshape(x.shape[:-1])


def row_sum_reference(x: jax.Array, *, least_rows: int) -> jax.Array:
    """The same in jnp."""
    width = x.shape[-1]
    if least_rows * width >= SAME_ORDER_FROM:
        return jnp.sum(x, axis=-1)
    whole = 1 << (width - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, whole - width)])
    while whole > 1:
        whole //= 2
        x = x[..., :whole] + x[..., whole:]
    return x[..., 0]


def _block_sums(x: jax.Array, backend: Backend) -> jax.Array:
    """float32[R, D] -> float32[R, B]: of each block of the row, the last one filled up with 0."""
    rows, width = x.shape
    tiles = ROW_TILES[backend.gpu]
    block = min(tiles.most, pl.next_power_of_2(width))

    def kernel(x_ref: Any, out_ref: Any) -> None:
        row, number = pl.program_id(0), pl.program_id(1)
        column = number * block + lax.iota(jnp.int32, block)
        part = plt.load(x_ref.at[row, column], mask=column < width, other=0.0)
        plt.store(out_ref.at[row, number], jnp.sum(part))

    return pl.pallas_call(
        kernel,
        grid=(rows, pl.cdiv(width, block)),
        out_shape=jax.ShapeDtypeStruct((rows, pl.cdiv(width, block)), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps(block), num_stages=1),
        interpret=backend.form == "interpret",
        name="row_sum",
    )(x)
