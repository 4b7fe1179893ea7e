"""The parts that decoders are made of, as Flax modules.

Weights keep Hugging Face's names and [out, in] layout: a mapped file goes to the device without a
transpose, and a row of a product does not depend on how many other rows there are (ARCHITECTURE,
exactness).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import MIN_ROWS
from jaxinfer.errors import ConfigError
from jaxinfer.models.arithmetic import Arithmetic, WeightFormat
from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.rms_norm import rms_norm


def _empty(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """A parameter to be filled by loading; modules are only ever built under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))


def _with_bias(
    product: Callable[..., jax.Array], bias: nnx.Param[jax.Array] | None, dtype: jnp.dtype
) -> jax.Array:
    """A product (out_dtype=) and its bias, rounded once, to dtype."""
    if bias is None:
        return product(out_dtype=dtype)
    y = product(out_dtype=jnp.dtype("float32"))
    return (y + bias[...].astype(jnp.float32)[None, :]).astype(dtype)


class Linear(nnx.Module):
    """y = x @ weight.T (+ bias); float[T, in] -> float[T, out], summed in float32."""

    def __init__(self, in_dim: int, out_dim: int, *, use_bias: bool, arithmetic: Arithmetic):
        self.weight = _empty((out_dim, in_dim), arithmetic.dtype)
        self.bias = _empty((out_dim,), arithmetic.dtype) if use_bias else None
        self.backend = arithmetic.backend

    def __call__(self, x: jax.Array) -> jax.Array:
        product = partial(matmul, x, self.weight[...], backend=self.backend)
        return _with_bias(product, self.bias, x.dtype)


class QuantizedLinear(nnx.Module):
    """The same with weights of 8 or 4 bits: `q`, and a `scale` for each group of inputs and output.

    Layouts: pallas_kernels/int8_matmul.py, int4_matmul.py.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        use_bias: bool,
        arithmetic: Arithmetic,
        weights: WeightFormat,
    ):
        group_size = weights.group_size or in_dim
        if in_dim % group_size:
            raise ConfigError(
                f"groups of {group_size} must divide the inputs of each product; "
                f"got {in_dim} inputs"
            )
        self.q = _empty((out_dim, in_dim * weights.bits // 8), jnp.dtype("int8"))
        self.scale = _empty((in_dim // group_size, out_dim), jnp.dtype("float32"))
        self.bias = _empty((out_dim,), arithmetic.dtype) if use_bias else None
        self.bits, self.backend = weights.bits, arithmetic.backend

    def __call__(self, x: jax.Array) -> jax.Array:
        operation = int8_matmul if self.bits == 8 else int4_matmul
        product = partial(operation, x, self.q[...], self.scale[...], backend=self.backend)
        return _with_bias(product, self.bias, x.dtype)


def layer_product(
    in_dim: int, out_dim: int, *, use_bias: bool, arithmetic: Arithmetic
) -> Linear | QuantizedLinear:
    """A product inside a layer, in the format of the layers' weights."""
    weights = arithmetic.weights
    if weights is None:
        return Linear(in_dim, out_dim, use_bias=use_bias, arithmetic=arithmetic)
    return QuantizedLinear(
        in_dim, out_dim, use_bias=use_bias, arithmetic=arithmetic, weights=weights
    )


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 (arXiv:1910.07467)."""

    def __init__(self, dim: int, *, eps: float, arithmetic: Arithmetic):
        self.weight = _empty((dim,), arithmetic.dtype)
        self.eps, self.backend = eps, arithmetic.backend

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        return rms_norm(x, weight, eps=self.eps, least_rows=MIN_ROWS, backend=self.backend)


class Embedding(nnx.Module):
    """int32[T] -> float[T, E]; its rows may also be the output head's."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: jnp.dtype):
        self.weight = _empty((vocab_size, dim), dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return self.weight[...].at[token_ids].get(mode="promise_in_bounds")


class MLP(nnx.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x)), rounded once between."""

    def __init__(self, dim: int, hidden_dim: int, *, use_bias: bool, arithmetic: Arithmetic):
        product = partial(layer_product, use_bias=use_bias, arithmetic=arithmetic)
        self.gate_proj = product(dim, hidden_dim)
        self.up_proj = product(dim, hidden_dim)
        self.down_proj = product(hidden_dim, dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (proj(x).astype(jnp.float32) for proj in (self.gate_proj, self.up_proj))
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))
