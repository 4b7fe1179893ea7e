"""x @ weight.T of int8 rows and an int8 weight, each with its scales (W8A8).

Sums of integers are exact in any order, so tiles and splits may follow the number of rows and a
row's bits still depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.addressing import check_addressable
from pallas_kernels.backend import REFERENCE, W8A8_TILES, Backend
from pallas_kernels.empty_axes import check_not_empty
from pallas_kernels.kv_write import nearest_integers, quantize, short_scale
from pallas_kernels.split_product import (
    Ref,
    TiledProduct,
    add_step,
    product,
    scaled,
    split_product,
)

LARGEST = 127  # of a quantized row
MOST_DEPTH = (2**31 - 1) // 128**2  # elements of K whose products' sum fits int32


def w8a8_matmul(
    xq: jax.Array,
    x_scale: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """(xq @ q.T) * x_scale * scale, where the product is exact.

    Args:
        xq: int8[M, K], and x_scale: float32[M], of quantize_rows.
        q: int8[N, K].
        scale: float32[N].
    Returns: out_dtype[M, N].
    Raises: ValueError naming the argument whose shape or dtype does not fit.
    """
    if backend.form == "reference":
        return w8a8_matmul_reference(xq, x_scale, q, scale, out_dtype=out_dtype)
    return split_product(
        w8a8_product(xq, x_scale, q, scale, backend),
        out_dtype=out_dtype,
        backend=backend,
        name="w8a8_matmul",
    )


def w8a8_product(
    xq: jax.Array, x_scale: jax.Array, q: jax.Array, scale: jax.Array, backend: Backend
) -> TiledProduct:
    """What w8a8_matmul computes, for the kernels. Raises: ValueError as it does."""
    _check(xq, x_scale, q, scale)
    check_not_empty(xq=xq, q=q)
    (num_rows, k), num_cols = xq.shape, q.shape[0]
    tiles = W8A8_TILES[backend.gpu].choices(is_single=False, is_exact=True)
    depth = tiles[0].depth

    def partial(
        refs: Sequence[Ref], rows: jax.Array, cols: jax.Array, first: jax.Array, end: jax.Array
    ) -> jax.Array:
        def step(number: jax.Array, total: jax.Array) -> jax.Array:
            return add_step(total, refs, rows, cols, number, depth)

        return lax.fori_loop(first, end, step, jnp.zeros((rows.size, cols.size), jnp.int32))

    return TiledProduct(
        partial,
        (xq, q),
        (num_rows, num_cols),
        tiles,
        pl.cdiv(k, depth),
        depth,
        row_scale=x_scale[None, :],
        col_scale=scale[None, :],
        sum_dtype=jnp.int32,
    )


def w8a8_matmul_reference(
    xq: jax.Array,
    x_scale: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """What w8a8_matmul computes, by XLA."""
    del backend
    _check(xq, x_scale, q, scale)
    return scaled(product(xq, q, jnp.int32), x_scale, scale).astype(out_dtype)


def quantize_rows(x: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """float[M, K] -> int8[M, K] of -127..127 and float32[M]: the row is about the first times the
    second, with the same bits in every program (kv_write.quantize).

    A row of zeros has scale 0, one with a NaN or an infinity an infinite scale.

    Args:
        scale: float32[], of all rows; what is beyond 127 times it becomes that. None: each row's
            largest magnitude / 127.
    Raises: ValueError for another shape or dtype.
    """
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floats [M, K]; got {x.dtype} {x.shape}")
    if scale is None:
        q, own = quantize(x)
        return q, own[:, 0]
    wide, short = x.astype(jnp.float32), short_scale(scale)
    is_finite = jnp.isfinite(wide).all(axis=1, keepdims=True)
    rows = jnp.where(is_finite, short, jnp.inf)
    return nearest_integers(jnp.clip(wide, -LARGEST * short, LARGEST * short), rows), rows[:, 0]


def _check(xq: jax.Array, x_scale: jax.Array, q: jax.Array, scale: jax.Array) -> None:
    if xq.ndim != 2 or xq.dtype != jnp.int8:
        raise ValueError(f"xq must be int8 [M, K]; got {xq.dtype} {xq.shape}")
    num_rows, k = xq.shape
    if q.ndim != 2 or q.dtype != jnp.int8 or q.shape[1] != k:
        raise ValueError(f"q must be int8 [N, {k}] for xq {xq.shape}; got {q.dtype} {q.shape}")
    for name, array, size in (("x_scale", x_scale, num_rows), ("scale", scale, q.shape[0])):
        if array.shape != (size,) or array.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32 ({size},); got {array.dtype} {array.shape}")
    if k > MOST_DEPTH:
        raise ValueError(f"xq may have K up to {MOST_DEPTH}, so that int32 holds a sum; got {k}")
    check_addressable(xq=xq, q=q)
