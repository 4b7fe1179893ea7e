"""x @ weight.T of float rows and a packed int4 weight with scales per group or per channel (W4A16).

Byte j of a group of g elements of K holds element j in its low half and element j + g/2 in its high
half, so that unpacking moves nothing between elements: the halves of a group are two products. A
last group that K does not fill is filled up, and so is an odd K of one scale per channel. Zero
points are subtracted as integers, which bfloat16 has exactly; the float32 sum of a group is what is
scaled, not the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.addressing import check_addressable
from pallas_kernels.backend import INT4_TILES, REFERENCE, Backend
from pallas_kernels.empty_axes import check_not_empty
from pallas_kernels.split_product import (
    Ref,
    TiledProduct,
    load_line,
    load_tile,
    product,
    scaled,
    split_product,
    sum_groups,
)
from pallas_kernels.weight_groups import GROUP_SIZES, check_zero, group_size_of, spread


def int4_matmul(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """x @ ((weight - zero) * scale).T, summed in float32.

    Args:
        x: bfloat16 or float32 [M, K].
        packed: int8[N, K'/2], of pack_int4 with the group size of the scales; K' is K filled up to
            whole groups, or to an even number.
        scale: float32[G, N], of groups of 32, 64 or 128 elements of K; one row: of channels.
        zero: int8[G, N] of 0..15, for a weight of 0..15. None: the weight is of -8..7.
    Returns: out_dtype[M, N].
    Raises: ValueError naming the argument whose shape or dtype does not fit.
    """
    if backend.form == "reference":
        return int4_matmul_reference(x, packed, scale, zero, out_dtype=out_dtype)
    return split_product(
        int4_product(x, packed, scale, zero, backend),
        out_dtype=out_dtype,
        backend=backend,
        name="int4_matmul",
    )


def int4_product(
    x: jax.Array, packed: jax.Array, scale: jax.Array, zero: jax.Array | None, backend: Backend
) -> TiledProduct:
    """What int4_matmul computes, for the kernels. Raises: ValueError as it does."""
    group_size = _group_size(x, packed, scale, zero)
    check_not_empty(x=x, packed=packed)
    (num_rows, k), num_cols = x.shape, packed.shape[0]
    tiles = INT4_TILES[backend.gpu].choices(
        is_single=x.dtype == jnp.float32, is_exact=backend.is_exact
    )
    is_per_channel = scale.shape[0] == 1
    half, width = (tiles[0].depth if is_per_channel else group_size) // 2, packed.shape[1]
    has_rest = width % half != 0
    byte_limit = width if has_rest else None
    limit = k if has_rest or k < 2 * width else None
    low_limit = width if is_per_channel and has_rest else limit

    def partial(
        refs: Sequence[Ref], rows: jax.Array, cols: jax.Array, first: jax.Array, end: jax.Array
    ) -> jax.Array:
        x_ref, packed_ref, *more = refs

        def part(number: jax.Array, total: jax.Array, zeros: Sequence[jax.Array]) -> jax.Array:
            at = lax.iota(jnp.int32, half)
            low_at = number * (half if is_per_channel else 2 * half) + at
            high_at = low_at + (width if is_per_channel else half)
            both = load_tile(packed_ref, cols, number * half + at, byte_limit)
            low, high = _halves(both, is_signed=zero is None)
            for middle in zeros:
                low, high = low - middle[:, None], high - middle[:, None]
            total = total + product(load_tile(x_ref, rows, low_at, low_limit), low.astype(x.dtype))
            return total + product(load_tile(x_ref, rows, high_at, limit), high.astype(x.dtype))

        start = jnp.zeros((rows.size, cols.size), jnp.float32)
        if is_per_channel:
            zeros = [load_line(ref, 0, cols) for ref in more]
            return lax.fori_loop(first, end, lambda n, total: part(n, total, zeros), start)
        return sum_groups(lambda g, now: part(g, start, now[:-1]), more, rows, cols, first, end)

    return TiledProduct(
        partial,
        [x, packed, *([] if zero is None else [zero]), *([] if is_per_channel else [scale])],
        (num_rows, num_cols),
        tiles,
        pl.cdiv(width, half),
        2 * half,
        col_scale=scale if is_per_channel else None,
    )


def int4_matmul_reference(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    out_dtype: DTypeLike = jnp.float32,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """What int4_matmul computes, by XLA; scales of groups go to a float32 copy of the weight."""
    del backend
    group_size = _group_size(x, packed, scale, zero)
    k = x.shape[1]
    weight = unpack_int4(packed, group_size, is_signed=zero is None)[:, :k]
    if zero is not None:
        weight = weight - spread(zero, group_size, k)
    if scale.shape[0] == 1:
        return scaled(product(x, weight.astype(x.dtype)), None, scale[0]).astype(out_dtype)
    weight = weight.astype(jnp.float32) * spread(scale, group_size, k)
    return product(x.astype(jnp.float32), weight).astype(out_dtype)


def pack_int4(values: jax.Array | np.ndarray, group_size: int) -> jax.Array:
    """int8[N, K] of -8..7, or of 0..15 -> int8[N, K/2].

    Args:
        group_size: even, a divisor of K; K itself for scales per channel.
    Raises: ValueError for another shape or dtype, or where concrete values are out of range.
    """
    if values.ndim != 2 or values.dtype != jnp.int8:
        raise ValueError(f"values must be int8 [N, K]; got {values.dtype} {values.shape}")
    _check_packing(values.shape[1], group_size)
    if not isinstance(values, core.Tracer) and values.size:
        lowest, highest = int(values.min()), int(values.max())
        if not (-8 <= lowest <= highest <= 7 or 0 <= lowest <= highest <= 15):
            raise ValueError(
                f"values must be of -8..7 or of 0..15; got {lowest} to {highest}, {values.shape}"
            )
    groups = jnp.asarray(values).reshape(values.shape[0], -1, 2, group_size // 2)
    return ((groups[:, :, 0] & 15) | (groups[:, :, 1] << 4)).reshape(values.shape[0], -1)


def unpack_int4(packed: jax.Array, group_size: int, *, is_signed: bool = True) -> jax.Array:
    """int8[N, K/2] -> int8[N, K] of -8..7, or of 0..15 if not signed.

    Raises: ValueError for another shape or dtype.
    """
    if packed.ndim != 2 or packed.dtype != jnp.int8:
        raise ValueError(f"packed must be int8 [N, K/2]; got {packed.dtype} {packed.shape}")
    _check_packing(2 * packed.shape[1], group_size)
    both = jnp.asarray(packed).reshape(packed.shape[0], -1, group_size // 2)
    low, high = _halves(both, is_signed=is_signed)
    return jnp.stack([low, high], axis=2).reshape(packed.shape[0], -1)


def _halves(packed: jax.Array, *, is_signed: bool) -> tuple[jax.Array, jax.Array]:
    """The low and the high halves of bytes, as int8."""
    if is_signed:
        return (packed << 4) >> 4, packed >> 4
    return packed & 15, (packed >> 4) & 15


def _check_packing(k: int, group_size: int) -> None:
    if group_size < 2 or group_size % 2 or k % group_size:
        raise ValueError(f"group_size must be even and divide K = {k}; got {group_size}")


def _group_size(x: jax.Array, packed: jax.Array, scale: jax.Array, zero: jax.Array | None) -> int:
    """That K was packed with: of one group, K filled up to an even number or to a whole group."""
    if packed.ndim != 2 or packed.dtype != jnp.int8:
        raise ValueError(f"packed must be int8 [N, K/2]; got {packed.dtype} {packed.shape}")
    size, num_groups, k = group_size_of(x, scale, packed.shape[0]), scale.shape[0], x.shape[1]
    sizes = (size,)
    if num_groups == 1:
        sizes = (k + k % 2, *(whole for whole in GROUP_SIZES if whole >= k))
    widths = [num_groups * size // 2 for size in sizes]
    if packed.shape[1] not in widths:
        raise ValueError(
            f"packed must be int8 [N, K/2] for x [M, K] {x.shape}, K filled up to whole groups: "
            f"{' or '.join(map(str, widths))} bytes a row; got {packed.shape}"
        )
    check_addressable(packed=packed)
    check_zero(zero, scale)
    return sizes[widths.index(packed.shape[1])]
