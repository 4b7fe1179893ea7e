"""How the scales of a quantized weight [N, K] divide K: in groups, or one per channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GROUP_SIZES = (32, 64, 128)


def group_size_of(x: jax.Array, scale: jax.Array, num_cols: int) -> int:
    """Elements of K that share a scale; all of K if there is one scale per channel.

    Args:
        x: bfloat16 or float32 [M, K].
        scale: float32[K/g, N].
        num_cols: N.
    Raises: ValueError naming the argument whose shape or dtype does not fit.
    """
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x must be bfloat16 or float32 [M, K]; got {x.dtype} {x.shape}")
    if scale.ndim != 2 or scale.shape[1] != num_cols or scale.dtype != jnp.float32:
        raise ValueError(
            f"scale must be float32 [K/g, {num_cols}]; got {scale.dtype} {scale.shape}"
        )
    k, num_groups = x.shape[1], scale.shape[0]
    sizes = [k, *GROUP_SIZES]
    if num_groups < 1 or k % num_groups or k // num_groups not in sizes:
        fitting = [k // size for size in sizes if k % size == 0]
        raise ValueError(
            f"scale must have one row per channel or group of {GROUP_SIZES} elements of K = {k}: "
            f"one of {fitting} rows; got {scale.shape}"
        )
    return k // num_groups
