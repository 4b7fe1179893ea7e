"""x @ weight.T of floats, in an order that does not depend on how many rows x has.

A compiler's own product picks tiles and splits by shape, so that a row's bits depend on its
company; the kernel's tiles, instructions and splits of K follow from N and K alone
(pallas_kernels/split_product.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.backend import DENSE_TILES, REFERENCE, Backend
from pallas_kernels.empty_axes import check_not_empty
from pallas_kernels.split_product import Ref, TiledProduct, add_step, split_product


def matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """x @ weight.T, summed in float32.

    Args:
        x: bfloat16 or float32 [M, K].
        weight: [N, K], of the dtype of x.
        backend: one that is not exact takes XLA's own product.
    Returns: out_dtype[M, N].
    Raises: ValueError naming the argument whose shape or dtype does not fit.
    """
    _check(x, weight)
    if backend.form == "reference" or not backend.is_exact:
        return matmul_reference(x, weight, out_dtype=out_dtype)
    product = dense_product(x, weight, backend)
    return split_product(product, out_dtype=out_dtype, backend=backend, name="matmul")


def dense_product(x: jax.Array, weight: jax.Array, backend: Backend) -> TiledProduct:
    """What matmul computes in the kernels, always exact. Raises: ValueError as it does."""
    _check(x, weight)
    check_not_empty(x=x, weight=weight)
    (num_rows, k), num_cols = x.shape, weight.shape[0]
    tiles = DENSE_TILES[backend.gpu].choices(is_single=x.dtype == jnp.float32, is_exact=True)
    depth = tiles[0].depth

    def partial(
        refs: Sequence[Ref], rows: jax.Array, cols: jax.Array, first: jax.Array, end: jax.Array
    ) -> jax.Array:
        def step(number: jax.Array, total: jax.Array) -> jax.Array:
            return add_step(total, refs, rows, cols, number, depth)

        start = jnp.zeros((rows.size, cols.size), jnp.float32)
        return lax.fori_loop(first, end, step, start)

    shape = num_rows, num_cols
    return TiledProduct(partial, (x, weight), shape, tiles, pl.cdiv(k, depth), depth)


def matmul_reference(
    x: jax.Array,
    weight: jax.Array,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """What matmul computes, by XLA."""
    del backend
    total = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return total.astype(out_dtype)


def _check(x: jax.Array, weight: jax.Array) -> None:
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x must be bfloat16 or float32 [M, K]; got {x.dtype} {x.shape}")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {x.dtype} [N, {x.shape[1]}] for x {x.shape}; "
            f"got {weight.dtype} {weight.shape}"
        )
