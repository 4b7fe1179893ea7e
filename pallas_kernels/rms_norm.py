"""RMSNorm whose bits of a row do not depend on how many rows there are (arXiv:1910.07467).

The kernel is one program per row, with a layout that the width alone decides. XLA's GPU compiler
chooses the order of a reduction from the whole shape; its CPU compiler is dealt with in row_sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import REFERENCE, ROW_TILES, Backend
from pallas_kernels.empty_axes import check_not_empty
from pallas_kernels.row_sum import row_sum


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    adds_one: bool = False,
    least_rows: int = 1,
    backend: Backend = REFERENCE,
) -> jax.Array:
    """x / rms(x) * weight over the last axis, in float32.

    Args:
        x: float[T, E].
        weight: float[E].
        eps: added to the mean of the squares.
        adds_one: 1 is added to the weight, in float32.
        least_rows: as of row_sum; of the reference form.
    Returns: [T, E] of x's dtype.
    Raises: ValueError naming the argument that does not fit.
    """
    _check(x, weight, backend)
    if backend.form == "reference":
        return rms_norm_reference(x, weight, eps=eps, adds_one=adds_one, least_rows=least_rows)
    check_not_empty(x=x)
    width = x.shape[1]
    lanes = pl.next_power_of_2(width)
    return pl.pallas_call(
        partial(_kernel, eps=eps, adds_one=adds_one),
        grid=(x.shape[0],),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plt.CompilerParams(
            num_warps=ROW_TILES[backend.gpu].warps(lanes), num_stages=1
        ),
        interpret=backend.form == "interpret",
        name="rms_norm",
    )(x, weight)


def rms_norm_reference(
    x: jax.Array, weight: jax.Array, *, eps: float, adds_one: bool = False, least_rows: int
) -> jax.Array:
    """The same in jnp."""
    wide = x.astype(jnp.float32)
    dim = x.shape[-1]
    # rsqrt(mean + eps) without a product before the sum (row_sum.py says why).
    total = row_sum(wide * wide, least_rows=least_rows) + dim * eps
    normed = wide * (lax.rsqrt(total) * dim**0.5)[:, None]
    return (normed * _factor(weight, adds_one)[None, :]).astype(x.dtype)


def _factor(weight: jax.Array, adds_one: bool) -> jax.Array:
    wide = weight.astype(jnp.float32)
    return wide + 1.0 if adds_one else wide


def _kernel(x_ref: Any, weight_ref: Any, out_ref: Any, *, eps: float, adds_one: bool) -> None:
    width = x_ref.shape[1]
    row = pl.program_id(0)
    column = lax.iota(jnp.int32, pl.next_power_of_2(width))
    is_held = column < width
    wide = plt.load(x_ref.at[row, column], mask=is_held, other=0).astype(jnp.float32)
    weight = _factor(plt.load(weight_ref.at[column], mask=is_held, other=0), adds_one)
    total = jnp.sum(wide * wide) + width * eps
    normed = wide * (lax.rsqrt(total) * width**0.5)
    plt.store(out_ref.at[row, column], (normed * weight).astype(out_ref.dtype), mask=is_held)


def _check(x: jax.Array, weight: jax.Array, backend: Backend) -> None:
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be float[T, E]; got {x.dtype}{list(x.shape)}")
    if weight.shape != x.shape[1:] or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"weight must be float[{x.shape[1]}]; got {weight.dtype}{list(weight.shape)}"
        )
    most = ROW_TILES[backend.gpu].most
    if backend.form != "reference" and x.shape[1] > most:
        raise ValueError(f"x must have rows of at most {most} elements; got {x.shape}")
