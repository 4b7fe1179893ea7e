"""One step's keys and values into the KV pool, in place and in one launch; int8 pools: quantized.

A program takes one token, and reads and writes nothing of any other. What a token's bits are is
therefore its own affair, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.addressing import check_addressable
from pallas_kernels.backend import REFERENCE, TOKEN_TILES, Backend
from pallas_kernels.empty_axes import check_not_empty

LEVELS = 127  # on each side of 0
LEAST_SCALE = 2.0**-100  # smaller ones are 0: far from what a device may flush to 0
LARGEST = float(jnp.finfo(jnp.float32).max)
SCALE_BITS = -(1 << 9)  # of a float32: sign, exponent and 14 bits of mantissa


def write_kv(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    *,
    backend: Backend = REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """Each token's keys and values at its page and slot.

    Args:
        k, v: float[T, K, D].
        k_pages, v_pages: float[P, K, S, D]; donate them, or they are copied.
        page: int32[T] of 0..P-1, or P for padding, which is written nowhere.
        slot: int32[T] of 0..S-1. No two tokens have the same page and slot.
    Returns: k_pages, v_pages with the new tokens, cast to the pools' dtype.
    Raises: ValueError naming the argument that does not fit.
    """
    _check(k, v, k_pages, v_pages, page, slot)
    if k_pages.dtype != v_pages.dtype or not jnp.issubdtype(k_pages.dtype, jnp.floating):
        raise ValueError(
            f"k_pages and v_pages must be of one float dtype (write_quantized_kv is for int8); "
            f"got {k_pages.dtype} and {v_pages.dtype}"
        )
    if backend.form == "reference":
        return write_kv_reference(k, v, k_pages, v_pages, page, slot)
    keys, values = _call(
        _write_kernel, (k, v, k_pages, v_pages, page, slot), (2, 3), backend, "kv_write"
    )
    return keys, values


def write_kv_reference(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page: jax.Array,
    slot: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The same as a scatter."""
    return _scatter(k_pages, k, page, slot), _scatter(v_pages, v, page, slot)


def write_quantized_kv(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scales: jax.Array,
    v_scales: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    *,
    backend: Backend = REFERENCE,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The same into int8 pools, with a scale for each token and head (`quantize`).

    Args:
        k, v: float[T, K, D].
        k_pages, v_pages: int8[P, K, S, D]; donate them and the scales, or they are copied.
        k_scales, v_scales: float32[P, K, S].
        page: int32[T] of 0..P-1, or P for padding, which is written nowhere.
        slot: int32[T] of 0..S-1. No two tokens have the same page and slot.
    Returns: k_pages, v_pages, k_scales, v_scales with the new tokens.
    Raises: ValueError naming the argument that does not fit.
    """
    _check(k, v, k_pages, v_pages, page, slot)
    _check_int8(k_pages, v_pages, k_scales, v_scales)
    arguments = (k, v, k_pages, v_pages, k_scales, v_scales, page, slot)
    if backend.form == "reference":
        return write_quantized_kv_reference(*arguments)
    pools = _call(_quantize_kernel, arguments, (2, 3, 4, 5), backend, "kv_write_int8")
    return pools[0], pools[1], pools[2], pools[3]


def write_quantized_kv_reference(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scales: jax.Array,
    v_scales: jax.Array,
    page: jax.Array,
    slot: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The same in jnp."""
    (keys, key_scales), (values, value_scales) = quantize(k), quantize(v)
    return (
        _scatter(k_pages, keys, page, slot),
        _scatter(v_pages, values, page, slot),
        _scatter(k_scales, key_scales[..., 0], page, slot),
        _scatter(v_scales, value_scales[..., 0], page, slot),
    )


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 over the last axis, with the same bits on every device and in every program.

    The scale is the largest magnitude / 127, cut to 15 significant bits; q is x / scale rounded to
    the nearest, half to even.

    Args:
        x: float[..., D].
    Returns: q int8[..., D] of -127..127, and scale float32[..., 1]. Where the scale would be below
        LEAST_SCALE, it and q are 0. Where a number is not finite, the scale is inf and q is 0, so
        that q * scale is NaN.
    """
    wide = x.astype(jnp.float32)
    size = jnp.where(jnp.abs(wide) <= LARGEST, jnp.abs(wide), jnp.inf)  # NaN, too, becomes inf
    scale = jnp.max(size, axis=-1, keepdims=True) * (1 / LEVELS)
    scale = short_scale(scale)
    return nearest_integers(wide, scale), scale


def short_scale(scale: jax.Array) -> jax.Array:
    """float32, cut to 15 significant bits; 0 where it would be below LEAST_SCALE."""
    bits = lax.bitcast_convert_type(scale, jnp.int32) & SCALE_BITS
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(scale < LEAST_SCALE, 0.0, scale)


def nearest_integers(wide: jax.Array, scale: jax.Array) -> jax.Array:
    """wide / scale to the nearest, half to even; 0 where the scale is 0 or not finite.

    Devices divide differently in the last bit, so a quotient is only a first guess: comparing wide
    with (q ± 1/2) * scale, which is exact, decides.

    Args:
        wide: float32[..., D] of magnitudes up to 127 and a little times the scale.
        scale: float32[..., 1], of short_scale.
    Returns: int8[..., D] of -127..127.
    """
    is_plain = (scale > 0) & (scale < jnp.inf)
    divisor = jnp.where(is_plain, scale, 1.0)
    wide = jnp.where(is_plain, wide, 0.0)
    guess = jnp.floor(wide * (1 / divisor) + 0.5)  # at most 1 away from q
    number = guess.astype(jnp.int32)
    is_odd = (number & 1) == 1
    above, below = (guess + 0.5) * divisor, (guess - 0.5) * divisor
    up = (wide > above) | ((wide == above) & is_odd)
    down = (wide < below) | ((wide == below) & is_odd)
    q = number + up.astype(jnp.int32) - down.astype(jnp.int32)
    return q.astype(jnp.int8)


def _scatter(pool: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """[T, K, ...] into [P, K, S, ...]. A page past the pool is dropped."""
    return pool.at[page, :, slot].set(new.astype(pool.dtype), mode="drop")


def _write_kernel(*refs: Any) -> None:
    """Of the pools only the outputs are touched: the inputs are the same memory."""
    k_ref, v_ref, _, _, page_ref, slot_ref, keys_ref, values_ref = refs
    token, page, slot, is_real = _place(page_ref, slot_ref, keys_ref)

    @pl.when(is_real)
    def _() -> None:
        for new_ref, pool_ref in ((k_ref, keys_ref), (v_ref, values_ref)):
            head, column, is_held = _lanes(new_ref)
            new = plt.load(new_ref.at[token, head, column], mask=is_held, other=0)
            at = pool_ref.at[page, head, slot, column]
            plt.store(at, new.astype(pool_ref.dtype), mask=is_held)


def _quantize_kernel(*refs: Any) -> None:
    k_ref, v_ref, _, _, _, _, page_ref, slot_ref, *pools = refs
    keys_ref, values_ref, key_scales_ref, value_scales_ref = pools
    token, page, slot, is_real = _place(page_ref, slot_ref, keys_ref)

    @pl.when(is_real)
    def _() -> None:
        for new_ref, pool_ref, scales_ref in (
            (k_ref, keys_ref, key_scales_ref),
            (v_ref, values_ref, value_scales_ref),
        ):
            head, column, is_held = _lanes(new_ref)
            new = plt.load(new_ref.at[token, head, column], mask=is_held, other=0)
            q, scale = quantize(new)
            plt.store(pool_ref.at[page, head, slot, column], q, mask=is_held)
            plt.store(scales_ref.at[page, head, slot], scale, mask=head < new_ref.shape[1])


def _place(
    page_ref: Any, slot_ref: Any, pool_ref: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """This program's token, its page and slot, and whether the pool has such a place."""
    token = pl.program_id(0)
    page, slot = page_ref[token], slot_ref[token]
    is_page = (page >= 0) & (page < pool_ref.shape[0])
    return token, page, slot, is_page & (slot >= 0) & (slot < pool_ref.shape[2])


def _lanes(new_ref: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32[K', 1] of heads, int32[1, D'] of columns, bool[K', D']; K' and D' powers of two."""
    _, heads, head_dim = new_ref.shape
    head = lax.iota(jnp.int32, pl.next_power_of_2(heads))[:, None]
    column = lax.iota(jnp.int32, pl.next_power_of_2(head_dim))[None, :]
    return head, column, (head < heads) & (column < head_dim)


def _call(
    kernel: Callable[..., None],
    arguments: tuple[jax.Array, ...],
    pools: tuple[int, ...],  # which arguments are written in place, in the order of the outputs
    backend: Backend,
    name: str,
) -> list[jax.Array]:
    check_not_empty(k=arguments[0], k_pages=arguments[2])
    num_tokens, heads, head_dim = arguments[0].shape
    tiles = TOKEN_TILES[backend.gpu]
    lanes = pl.next_power_of_2(heads) * pl.next_power_of_2(head_dim)
    if lanes > tiles.most:
        raise ValueError(
            f"k must have at most {tiles.most} elements per token, both K and D rounded up to "
            f"powers of two; got {arguments[0].shape}"
        )
    return pl.pallas_call(
        kernel,
        grid=(num_tokens,),
        out_shape=[jax.ShapeDtypeStruct(arguments[i].shape, arguments[i].dtype) for i in pools],
        input_output_aliases={argument: out for out, argument in enumerate(pools)},
        compiler_params=plt.CompilerParams(num_warps=tiles.warps(lanes), num_stages=1),
        interpret=backend.form == "interpret",
        name=name,
    )(*arguments)


def _check(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page: jax.Array,
    slot: jax.Array,
) -> None:
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must have one shape [P, K, S, D]; "
            f"got {k_pages.shape} and {v_pages.shape}"
        )
    _, heads, _, head_dim = k_pages.shape
    for name, new in (("k", k), ("v", v)):
        is_float = jnp.issubdtype(new.dtype, jnp.floating)
        if new.shape != (*k.shape[:1], heads, head_dim) or not is_float:
            raise ValueError(
                f"{name} must be float[T, {heads}, {head_dim}], with one T for k and v; "
                f"got {new.dtype}{list(new.shape)}"
            )
    for name, index in (("page", page), ("slot", slot)):
        if index.shape != k.shape[:1] or index.dtype != jnp.int32:
            raise ValueError(
                f"{name} must be int32[{k.shape[0]}]; got {index.dtype}{list(index.shape)}"
            )
    check_addressable(k_pages=k_pages, v_pages=v_pages)


def _check_int8(
    k_pages: jax.Array, v_pages: jax.Array, k_scales: jax.Array, v_scales: jax.Array
) -> None:
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype != jnp.int8:
            raise ValueError(f"{name} must be int8; got {pages.dtype}")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales.shape != k_pages.shape[:3] or scales.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32{list(k_pages.shape[:3])}; "
                f"got {scales.dtype}{list(scales.shape)}"
            )
