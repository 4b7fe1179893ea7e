"""x @ weight.T of float rows and an int8 weight with scales per group or per channel (W8A16).

The weight goes to the tensor cores as the integers that it holds, or their differences from zero
points, which bfloat16 has exactly; the float32 sum of a group is what is scaled, not the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.addressing import check_addressable
from pallas_kernels.backend import INT8_TILES, REFERENCE, Backend
from pallas_kernels.empty_axes import check_not_empty
from pallas_kernels.split_product import (
    Ref,
    TiledProduct,
    add_step,
    load_line,
    product,
    scaled,
    split_product,
    sum_groups,
)
from pallas_kernels.weight_groups import check_zero, group_size_of, spread


def int8_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """x @ ((q - zero) * scale).T, summed in float32.

    Args:
        x: bfloat16 or float32 [M, K].
        q: int8[N, K].
        scale: float32[G, N], of groups of 32, 64 or 128 elements of K, of which the last may have
            fewer; one row: of channels.
        zero: int8[G, N], or None.
    Returns: out_dtype[M, N].
    Raises: ValueError naming the argument whose shape or dtype does not fit.
    """
    if backend.form == "reference":
        return int8_matmul_reference(x, q, scale, zero, out_dtype=out_dtype)
    return split_product(
        int8_product(x, q, scale, zero, backend),
        out_dtype=out_dtype,
        backend=backend,
        name="int8_matmul",
    )


def int8_product(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None, backend: Backend
) -> TiledProduct:
    """What int8_matmul computes, for the kernels. Raises: ValueError as it does."""
    group_size = _group_size(x, q, scale, zero)
    check_not_empty(x=x, q=q)
    (num_rows, k), num_cols = x.shape, q.shape[0]
    tiles = INT8_TILES[backend.gpu].choices(
        is_single=x.dtype == jnp.float32, is_exact=backend.is_exact
    )
    is_per_channel = scale.shape[0] == 1
    depth = tiles[0].depth if is_per_channel else group_size

    def partial(
        refs: Sequence[Ref], rows: jax.Array, cols: jax.Array, first: jax.Array, end: jax.Array
    ) -> jax.Array:
        def part(number: jax.Array, total: jax.Array, zeros: Sequence[jax.Array]) -> jax.Array:
            return add_step(total, refs[:2], rows, cols, number, depth, zeros)

        start = jnp.zeros((rows.size, cols.size), jnp.float32)
        if is_per_channel:
            zeros = [load_line(ref, 0, cols) for ref in refs[2:]]
            return lax.fori_loop(first, end, lambda n, total: part(n, total, zeros), start)
        return sum_groups(lambda g, now: part(g, start, now[:-1]), refs[2:], rows, cols, first, end)

    return TiledProduct(
        partial,
        [x, q, *([] if zero is None else [zero]), *([] if is_per_channel else [scale])],
        (num_rows, num_cols),
        tiles,
        pl.cdiv(k, depth),
        depth,
        col_scale=scale if is_per_channel else None,
    )


def int8_matmul_reference(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """What int8_matmul computes, by XLA; scales of groups go to a float32 copy of the weight."""
    del backend
    group_size = _group_size(x, q, scale, zero)
    weight = q.astype(jnp.float32)
    if zero is not None:
        weight = weight - spread(zero, group_size, q.shape[1]).astype(jnp.float32)
    if scale.shape[0] == 1:
        return scaled(product(x, weight.astype(x.dtype)), None, scale[0]).astype(out_dtype)
    weight = weight * spread(scale, group_size, q.shape[1])
    return product(x.astype(jnp.float32), weight).astype(out_dtype)


def _group_size(x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None) -> int:
    if q.ndim != 2 or q.dtype != jnp.int8 or q.shape[1:] != x.shape[1:]:
        raise ValueError(f"q must be int8 [N, K] for x [M, K] {x.shape}; got {q.dtype} {q.shape}")
    check_addressable(q=q)
    check_zero(zero, scale)
    return group_size_of(x, scale, q.shape[0])
