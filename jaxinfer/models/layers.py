"""The parts that decoders are made of, as Flax modules.

Weights keep Hugging Face's names and [out, in] layout: a mapped file goes to the device without a
transpose, and a row of a product does not depend on how many other rows there are (ARCHITECTURE,
exactness).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.config import MIN_ROWS
from pallas_kernels.row_sum import row_sum


def _empty(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """A parameter to be filled by loading; modules are only ever built under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))


class Linear(nnx.Module):
    """y = x @ weight.T (+ bias); float[T, in] -> float[T, out], summed in float32."""

    def __init__(self, in_dim: int, out_dim: int, *, use_bias: bool, dtype: jnp.dtype):
        self.weight = _empty((out_dim, in_dim), dtype)
        self.bias = _empty((out_dim,), dtype) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul_transposed(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)[None, :]
        return y.astype(x.dtype)


def matmul_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float[T, in] x float[out, in] -> float32[T, out]."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 (arXiv:1910.07467)."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.weight = _empty((dim,), dtype)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        dim = x.shape[-1]
        # rsqrt(mean + eps) without a product before the sum (pallas_kernels/row_sum.py says why).
        total = row_sum(wide * wide, least_rows=MIN_ROWS) + dim * self.eps
        normed = wide * (lax.rsqrt(total) * dim**0.5)[:, None]
        return (normed * self.weight[...].astype(jnp.float32)[None, :]).astype(x.dtype)


class Embedding(nnx.Module):
    """int32[T] -> float[T, E]; its rows may also be the output head's."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: jnp.dtype):
        self.weight = _empty((vocab_size, dim), dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return self.weight[...].at[token_ids].get(mode="promise_in_bounds")


class MLP(nnx.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden_dim: int, *, use_bias: bool, dtype: jnp.dtype):
        self.gate_proj = Linear(dim, hidden_dim, use_bias=use_bias, dtype=dtype)
        self.up_proj = Linear(dim, hidden_dim, use_bias=use_bias, dtype=dtype)
        self.down_proj = Linear(hidden_dim, dim, use_bias=use_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
