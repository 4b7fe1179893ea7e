"""How the scales of a quantized weight [N, K] divide K: in groups, or one per channel.

The last group may be shorter than the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

GROUP_SIZES = (32, 64, 128)


def group_size_of(x: jax.Array, scale: jax.Array, num_cols: int) -> int:
    """Elements of K that share a scale, all of K if there is one scale per channel.

    Args:
        x: bfloat16 or float32 [M, K].
        scale: float32[G, N], G = K/g rounded up.
        num_cols: N.
    Raises: ValueError naming the argument whose shape or dtype does not fit.
    """
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x must be bfloat16 or float32 [M, K]; got {x.dtype} {x.shape}")
    if scale.ndim != 2 or scale.shape[1] != num_cols or scale.dtype != jnp.float32:
        raise ValueError(f"scale must be float32 [G, {num_cols}]; got {scale.dtype} {scale.shape}")
    k, num_groups = x.shape[1], scale.shape[0]
    sizes = [k, *GROUP_SIZES]
    fitting = [pl.cdiv(k, size) if k else 1 for size in sizes]
    if num_groups not in fitting:
        raise ValueError(
            f"scale must have one row per channel or group of {GROUP_SIZES} elements of K = {k}: "
            f"one of {fitting} rows; got {scale.shape}"
        )
    return sizes[fitting.index(num_groups)]


def check_zero(zero: jax.Array | None, scale: jax.Array) -> None:
    """Raises: ValueError for zero points that do not stand beside the scales."""
    if zero is not None and (zero.shape != scale.shape or zero.dtype != jnp.int8):
        raise ValueError(
            f"zero must be int8 {scale.shape} like scale; got {zero.dtype} {zero.shape}"
        )


def spread(per_group: jax.Array, group_size: int, k: int) -> jax.Array:
    """[G, N] -> [N, K]: each group's value at each of its elements."""
    return jnp.repeat(per_group.T, group_size, axis=1)[:, :k]
