"""x @ weight.T of float rows and an int8 weight by products of integers alone, for XLA.

A row of x becomes one or two int8 terms under its largest magnitude: with two, 15 bits of it are
kept and the result is that of float rows to 2**-15 of the row's largest. XLA's CPU multiplies int8
by int8 several times as fast as it converts an operand (ARCHITECTURE), and sums of integers are
exact in any order. A GPU has kernels for float rows (int8_matmul.py, int4_matmul.py).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.rounded import rounded

LEVELS = 127  # on each side of 0
WIDTH_PER_ROW = 16  # inputs for each row, counting its terms, from which rows are few
TERM = 256  # of the second term's unit in the first's; a power of two, so that adding them rounds
# once, fused or not


def integer_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    group_size: int | None = None,
    num_terms: Literal[1, 2] = 2,
    x_scale: jax.Array | None = None,
    out_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """x @ ((q - zero) * scale).T, with x rounded to `num_terms` int8 terms.

    Args:
        x: float[M, K].
        q: int8[N, K].
        scale: float32[G, N], of groups of group_size elements of K, the last may be shorter.
        zero: int8[G, N].
        x_scale: float32[], of all rows (static); None: each row's largest magnitude / 127.
    Returns: out_dtype[M, N].
    """
    terms, row_scale = terms_of(x, num_terms, x_scale)
    size = group_size or q.shape[1]
    total = None
    for group, start in enumerate(range(0, q.shape[1], size)):
        part = _product(terms[:, start : start + size], q[:, start : start + size])
        if zero is not None:
            sums = terms[:, start : start + size].astype(jnp.int32).sum(axis=1, keepdims=True)
            part = part - sums * zero[group].astype(jnp.int32)[None, :]
        scaled = rounded(_joined(part, num_terms) * scale[group][None, :])
        total = scaled if total is None else total + scaled
    assert total is not None
    return rounded(total * row_scale[:, None]).astype(out_dtype)


def terms_of(
    x: jax.Array, num_terms: Literal[1, 2], x_scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """float[M, K] -> int8[num_terms * M, K], the first terms first, and float32[M]: row i is about
    (first + second / TERM) times the scale. A row of zeros has scale 0 (unless it is given), one
    with a NaN or an infinity NaN.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    scale = jnp.where(
        jnp.isfinite(largest), largest / LEVELS if x_scale is None else x_scale, jnp.nan
    )
    ratio = jnp.where(scale[:, None] > 0, wide / scale[:, None], 0.0)
    first = jnp.clip(jnp.round(ratio), -LEVELS, LEVELS)
    if num_terms == 1:
        return first.astype(jnp.int8), scale
    second = jnp.clip(jnp.round((ratio - first) * TERM), -LEVELS, LEVELS)
    return jnp.concatenate([first, second]).astype(jnp.int8), scale


def _product(x: jax.Array, q: jax.Array) -> jax.Array:
    """int8[M, K], [N, K] -> int32[M, N]."""
    if x.shape[0] * WIDTH_PER_ROW > x.shape[1]:
        return _dot(x, q)
    # XLA CPU copies the second operand into another order first: rather a few rows than the
    # weights, but the product is then copied, too. The barrier keeps XLA from turning it around.
    return lax.optimization_barrier(_dot(q, x)).T


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def _joined(product: jax.Array, num_terms: int) -> jax.Array:
    """int32[num_terms * M, N] -> float32[M, N]."""
    floats = product.astype(jnp.float32)
    if num_terms == 1:
        return floats
    first, second = jnp.split(floats, 2)
    return first + second * (1 / TERM)
