"""Rotary position embedding (arXiv:2104.09864), in the half-split form of Hugging Face.

Frequencies are float64 on the host, once; the tables of a step are computed from its positions, so
that prefill and decode cannot use different ones. Nor can two texts of one engine: where others
choose frequencies by the length that a text has now, here the longest text that the engine takes
decides (`ModelConfig.serving`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxinfer.models.config import FULL, SLIDING, LayerType, ModelConfig, RopeScaling
from pallas_kernels.rounded import rounded

RopeTables = tuple[jax.Array, jax.Array]
"""Cosines and sines of a step's positions, each float32[T, 1, rotary_dim / 2]."""
Rope = tuple[RopeTables, ...]
"""Of each of `ModelConfig.rope_types`."""


def inverse_frequencies(
    config: ModelConfig, layer_type: LayerType = FULL
) -> npt.NDArray[np.float32]:
    """float32[rotary_dim / 2]; equal to transformers' for every type of rope_keys.py.

    `dynamic` raises the base for texts beyond max_position_embeddings alone, which no engine takes.
    """
    half = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    if layer_type == SLIDING and config.rope_local_base_freq is not None:
        return (config.rope_local_base_freq**-half).astype(np.float32)
    plain = config.rope_theta**-half
    scaling = config.rope_scaling
    if scaling is not None:
        plain = _scaled(plain, config.rope_theta, scaling)
    return plain.astype(np.float32)


def _scaled(
    plain: npt.NDArray[np.float64], theta: float, scaling: RopeScaling
) -> npt.NDArray[np.float64]:
    match scaling.rope_type:
        case "linear":
            return plain / scaling.factor
        case "dynamic":
            return plain
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, theta, scaling)
        case "longrope":  # arXiv:2402.13753
            return plain / (scaling.long_factors if scaling.is_long else scaling.short_factors)


def _llama3(plain: npt.NDArray[np.float64], scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Long wavelengths are divided by the factor, short ones kept, the band between blended."""
    wavelength = 2 * math.pi / plain
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(
    plain: npt.NDArray[np.float64], theta: float, scaling: RopeScaling
) -> npt.NDArray[np.float64]:
    """Pairs that turn more than beta_fast times in the trained context are kept, those that turn
    less than beta_slow times are divided by the factor; a ramp over the pairs between.
    """
    num_pairs, context = len(plain), scaling.original_max_position_embeddings

    def pair_of(num_turns: float) -> float:
        return num_pairs * math.log(context / (num_turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low or 0.001
    stretched = np.clip((np.arange(num_pairs) - low) / width, 0.0, 1.0)
    return stretched * plain / scaling.factor + (1 - stretched) * plain


def attention_factor(config: ModelConfig, layer_type: LayerType = FULL) -> float:
    """What cosines and sines are multiplied by."""
    is_local = layer_type == SLIDING and config.has_local_rope
    return 1.0 if config.rope_scaling is None or is_local else config.rope_scaling.attention_factor


def rope_tables(
    positions: jax.Array, frequencies: npt.NDArray[np.float32], factor: float = 1.0
) -> RopeTables:
    """Of positions int32[T]; factor: `attention_factor`."""
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (rounded(cos * factor), rounded(sin * factor))


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + R/2) of the first R of float[T, heads, D], in float32; tables have
    R/2 columns. Returns x's dtype.
    """
    turned, kept = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, kept], axis=-1) if kept.size else turned
