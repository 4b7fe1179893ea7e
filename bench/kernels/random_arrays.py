"""Operands on the device: random, and others for each copy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(number: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Normally distributed, times scale."""
    key = jax.random.key(_seed(number, shape))
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def small_ints(number: int, shape: tuple[int, ...], least: int, most: int) -> jax.Array:
    """int8 of least..most."""
    key = jax.random.key(_seed(number, shape))
    return jax.random.randint(key, shape, least, most + 1, jnp.int8)


def positive(number: int, shape: tuple[int, ...], scale: float) -> jax.Array:
    """float32 between half of scale and one and a half."""
    key = jax.random.key(_seed(number, shape))
    return scale * jax.random.uniform(key, shape, jnp.float32, 0.5, 1.5)


def shuffled(number: int, size: int) -> np.ndarray:
    """int32: 0..size-1 in random order."""
    return np.random.default_rng([number, size]).permutation(size).astype(np.int32)


def _seed(number: int, shape: tuple[int, ...]) -> int:
    return number * 1_000_003 + math.prod(shape) % 1_000_003
