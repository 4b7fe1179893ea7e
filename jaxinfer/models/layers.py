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
from jax import lax

from checkpoints.formats import HEAD_FORMAT, WeightFormat, packed_group
from jaxinfer.config import MIN_ROWS
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.config import Activation, ModelConfig
from jaxinfer.models.quantized_product import IntegerWeight, quantized_product
from pallas_kernels.matmul import matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rounded import rounded

ROWS_AT_ONCE = 128  # of an MLP of integer products in XLA's operations: what is between them stays
# in a core's cache


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

    Layouts: checkpoints/qtensor.py. `zero` holds zero points, `x_scale` the static scale of x,
    `order` the input that each column of the weight is of.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        use_bias: bool,
        arithmetic: Arithmetic,
        kept: WeightFormat,
    ):
        groups = kept.groups(in_dim)
        is_packed = kept.bits == 4 and not arithmetic.is_unpacked
        width = groups * packed_group(kept.group_size, in_dim) // 2 if is_packed else in_dim
        self.q = _empty((out_dim, width), jnp.dtype("int8"))
        self.scale = _empty((groups, out_dim), jnp.dtype("float32"))
        has_zero = kept.has_zero and (kept.bits == 8 or is_packed)
        self.zero = _empty((groups, out_dim), jnp.dtype("int8")) if has_zero else None
        is_static = kept.activations == "int8_static"
        self.x_scale = _empty((), jnp.dtype("float32")) if is_static else None
        self.order = _empty((in_dim,), jnp.dtype("int32")) if kept.has_order else None
        self.bias = _empty((out_dim,), arithmetic.dtype) if use_bias else None
        self.kept, self.backend = kept, arithmetic.backend

    def __call__(self, x: jax.Array) -> jax.Array:
        zero = None if self.zero is None else self.zero[...]
        x_scale = None if self.x_scale is None else self.x_scale[...]
        weight = IntegerWeight(self.q[...], self.scale[...], zero, x_scale)
        if self.order is not None:
            x = x.at[:, self.order[...]].get(mode="promise_in_bounds", unique_indices=True)
        product = partial(quantized_product, x, weight, self.kept, backend=self.backend)
        return _with_bias(product, self.bias, x.dtype)


def layer_product(
    name: str, in_dim: int, out_dim: int, *, use_bias: bool, arithmetic: Arithmetic
) -> Linear | QuantizedLinear:
    """A product of a module, in the format that its weights are kept in under this name."""
    kept = arithmetic.format_of(name)
    if kept is None:
        return Linear(in_dim, out_dim, use_bias=use_bias, arithmetic=arithmetic)
    return QuantizedLinear(in_dim, out_dim, use_bias=use_bias, arithmetic=arithmetic, kept=kept)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 (arXiv:1910.07467)."""

    adds_one = False  # to the weight

    def __init__(self, dim: int, *, eps: float, arithmetic: Arithmetic):
        self.weight = _empty((dim,), arithmetic.dtype)
        self.eps, self.backend = eps, arithmetic.backend

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(
            x,
            self.weight[...],
            eps=self.eps,
            adds_one=self.adds_one,
            least_rows=MIN_ROWS,
            backend=self.backend,
        )


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), Gemma's."""

    adds_one = True


def norm(config: ModelConfig, arithmetic: Arithmetic, dim: int | None = None) -> RMSNorm:
    """The family's, of hidden states or of `dim` numbers."""
    kind = OffsetRMSNorm if config.norm_adds_one else RMSNorm
    return kind(dim or config.hidden_size, eps=config.rms_norm_eps, arithmetic=arithmetic)


class Embedding(nnx.Module):
    """A row for each token, float[V, E]: for the embedding, the head, or both."""

    def __init__(self, vocab_size: int, dim: int, *, arithmetic: Arithmetic):
        self.weight = _empty((vocab_size, dim), arithmetic.dtype)
        self.backend = arithmetic.backend

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32[T] -> float[T, E]."""
        return self.weight[...].at[token_ids].get(mode="promise_in_bounds")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float[N, E] -> float32[N, V]."""
        return matmul(hidden, self.weight[...], backend=self.backend)


class QuantizedEmbedding(nnx.Module):
    """The same with rows of int8 integers, each with a scale."""

    def __init__(self, vocab_size: int, dim: int, *, arithmetic: Arithmetic):
        self.q = _empty((vocab_size, dim), jnp.dtype("int8"))
        self.scale = _empty((1, vocab_size), jnp.dtype("float32"))
        self.dtype, self.backend = arithmetic.dtype, arithmetic.backend

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32[T] -> float[T, E]."""
        rows = self.q[...].at[token_ids].get(mode="promise_in_bounds")
        scale = self.scale[...][0].at[token_ids].get(mode="promise_in_bounds")
        return rounded(rows.astype(jnp.float32) * scale[:, None]).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float[N, E] -> float32[N, V]."""
        weight = IntegerWeight(self.q[...], self.scale[...])
        return quantized_product(
            hidden, weight, HEAD_FORMAT, out_dtype=jnp.float32, backend=self.backend
        )


def embedding(
    vocab_size: int, dim: int, *, arithmetic: Arithmetic
) -> Embedding | QuantizedEmbedding:
    """In the format of embedding and head."""
    kind = Embedding if arithmetic.head_format is None else QuantizedEmbedding
    return kind(vocab_size, dim, arithmetic=arithmetic)


ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """Gated (arXiv:2002.05202): down(activation(gate(x)) * up(x)), rounded once between."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        use_bias: bool,
        arithmetic: Arithmetic,
        activation: Activation = "silu",
    ):
        product = partial(layer_product, use_bias=use_bias, arithmetic=arithmetic)
        self.gate_proj = product("gate_proj", dim, hidden_dim)
        self.up_proj = product("up_proj", dim, hidden_dim)
        self.down_proj = product("down_proj", hidden_dim, dim)
        self.activation: Activation = activation
        is_integer = isinstance(self.down_proj, QuantizedLinear)
        self.is_in_blocks = is_integer and arithmetic.backend.form == "reference"

    def __call__(self, x: jax.Array) -> jax.Array:
        """float[T, E] -> float[T, E]."""
        num_rows, dim = x.shape
        if not self.is_in_blocks or num_rows <= ROWS_AT_ONCE or num_rows % ROWS_AT_ONCE:
            return self._of_rows(x)
        return lax.map(self._of_rows, x.reshape(-1, ROWS_AT_ONCE, dim)).reshape(x.shape)

    def _of_rows(self, x: jax.Array) -> jax.Array:
        gate, up = (proj(x).astype(jnp.float32) for proj in (self.gate_proj, self.up_proj))
        return self.down_proj((ACTIVATIONS[self.activation](gate) * up).astype(x.dtype))
