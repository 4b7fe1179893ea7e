"""Rotary position embedding (arXiv:2104.09864), in the half-split form of Hugging Face.

Frequencies are float64 on the host, once; the tables of a step are computed from its positions, so
that prefill and decode cannot use different ones.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxinfer.models.config import FULL, SLIDING, LayerType, ModelConfig, RopeScaling

RopeTables = tuple[jax.Array, jax.Array]
"""Cosines and sines of a step's positions, each float32[T, 1, head_dim / 2]."""
Rope = tuple[RopeTables, ...]
"""Of each of `ModelConfig.rope_types`."""


def inverse_frequencies(
    config: ModelConfig, layer_type: LayerType = FULL
) -> npt.NDArray[np.float32]:
    """float32[head_dim / 2]; equal to transformers' for default, linear and llama3."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    if layer_type == SLIDING and config.rope_local_base_freq is not None:
        return (config.rope_local_base_freq**-half).astype(np.float32)
    plain = config.rope_theta**-half
    scaling = config.rope_scaling
    if scaling is None:
        return plain.astype(np.float32)
    if scaling.rope_type == "linear":
        return (plain / scaling.factor).astype(np.float32)
    return _llama3(plain, scaling).astype(np.float32)


def _llama3(plain: npt.NDArray[np.float64], scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Long wavelengths are divided by the factor, short ones kept, the band between blended."""
    wavelength = 2 * math.pi / plain
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def rope_tables(positions: jax.Array, frequencies: npt.NDArray[np.float32]) -> RopeTables:
    """Of positions int32[T]."""
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + D/2) of float[T, heads, D], in float32; returns x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
