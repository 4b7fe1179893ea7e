"""A mixture of experts (arXiv:1701.06538, arXiv:2401.04088): a router chooses, for each token, few
of many MLPs, whose outputs are weighted and added.

Exact in any batch: a token's experts follow from its own numbers (a tie goes to the lower number),
none is dropped however many tokens want the same one, and a token's outputs are added in the order
of its choices. All experts' weights of one product are one matrix, the experts' rows one under the
other, so they are kept in the formats of any product.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxinfer.config import MIN_ROWS
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.config import Activation, Experts
from jaxinfer.models.expert_kernels import kernel_product
from jaxinfer.models.expert_layout import ExpertLayout, block_rows, lay_out
from jaxinfer.models.layers import ACTIVATIONS, MLP, Linear, QuantizedLinear, layer_product
from jaxinfer.models.quantized_product import IntegerWeight, quantized_product
from pallas_kernels.expert_blocks import over_blocks
from pallas_kernels.matmul import matmul
from pallas_kernels.rounded import rounded
from pallas_kernels.row_sum import row_sum
from pallas_kernels.steady_exp import steady_exp, steady_sigmoid


class SparseMLP(nnx.Module):
    """Router, experts, and where the family has it an expert that all tokens share."""

    def __init__(
        self, dim: int, experts: Experts, *, arithmetic: Arithmetic, activation: Activation
    ):
        in_floats = Arithmetic(arithmetic.dtype, arithmetic.backend)  # what chooses or weighs
        self.gate = Linear(dim, experts.count, use_bias=False, arithmetic=in_floats)
        self.experts = ExpertMLPs(
            dim, experts, arithmetic=arithmetic.inside("experts"), activation=activation
        )
        shared = experts.shared_intermediate_size
        self.shared_expert = (
            None
            if shared is None
            else MLP(
                dim,
                shared,
                use_bias=False,
                arithmetic=arithmetic.inside("shared_expert"),
                activation=activation,
            )
        )
        self.shared_expert_gate = (
            None if shared is None else Linear(dim, 1, use_bias=False, arithmetic=in_floats)
        )
        self.sizes, self.backend = experts, arithmetic.backend

    def __call__(self, x: jax.Array, is_token: jax.Array | None = None) -> jax.Array:
        """float[T, E] -> float[T, E].

        is_token: bool[T], None: all; what is made of the others means nothing.
        """
        chosen, weights = self._routed(x)
        total = self.experts(x, chosen, weights, is_token)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            gate = steady_sigmoid(_in_float32(self.shared_expert_gate, x))
            total = total + rounded(gate * self.shared_expert(x).astype(jnp.float32))
        return total.astype(x.dtype)

    def _routed(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts int32[T, k] of each token, the likeliest first, and their float32 weights."""
        logits = _in_float32(self.gate, x)
        best, chosen = lax.top_k(logits, self.sizes.per_token)
        weights = steady_exp(best - best[:, :1])
        if self.sizes.normalizes:
            total = weights[:, 0]
            for choice in range(1, self.sizes.per_token):
                total = total + weights[:, choice]
        else:
            total = row_sum(
                steady_exp(logits - best[:, :1]), least_rows=MIN_ROWS, backend=self.backend
            )
        return chosen.astype(jnp.int32), rounded(weights / total[:, None])


class ExpertMLPs(nnx.Module):
    """The experts' gated MLPs: each product is a matrix of all experts' rows."""

    def __init__(
        self, dim: int, experts: Experts, *, arithmetic: Arithmetic, activation: Activation
    ):
        product = partial(layer_product, use_bias=False, arithmetic=arithmetic)
        hidden = experts.intermediate_size
        self.gate_proj = product("gate_proj", dim, experts.count * hidden)
        self.up_proj = product("up_proj", dim, experts.count * hidden)
        self.down_proj = product("down_proj", hidden, experts.count * dim)
        self.sizes = experts
        self.activation: Activation = activation

    def __call__(
        self, x: jax.Array, chosen: jax.Array, weights: jax.Array, is_token: jax.Array | None
    ) -> jax.Array:
        """float[T, E], int32[T, k], float32[T, k] -> float32[T, E]."""
        sizes = self.sizes
        rows = block_rows(len(x), sizes.per_token, sizes.count, least=MIN_ROWS)
        layout = lay_out(chosen, is_token, num_experts=sizes.count, rows=rows)
        inputs = x.at[layout.token_of].get(mode="fill", fill_value=0)
        product = partial(_expert_product, layout=layout, num_experts=sizes.count)
        gate, up = (
            product(own, inputs, out_dtype=x.dtype) for own in (self.gate_proj, self.up_proj)
        )
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        inner = (ACTIVATIONS[self.activation](gate) * up).astype(x.dtype)
        out = product(self.down_proj, inner, out_dtype=jnp.dtype("float32"))
        total = jnp.zeros(x.shape, jnp.float32)
        for choice in range(sizes.per_token):
            own = out.at[layout.row_of[:, choice]].get(mode="clip")
            total = total + rounded(own * weights[:, choice, None])
        return total


def _in_float32(product: Linear, x: jax.Array) -> jax.Array:
    return matmul(x, product.weight[...], backend=product.backend)


def _expert_product(
    product: Linear | QuantizedLinear,
    x: jax.Array,
    *,
    layout: ExpertLayout,
    num_experts: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """float[B * R, in] -> out_dtype[B * R, out], each block by its own expert."""
    if product.backend.form != "reference":
        return kernel_product(product, x, layout, num_experts=num_experts, out_dtype=out_dtype)
    blocks = partial(
        over_blocks,
        experts=layout.experts,
        num_blocks=layout.num_blocks,
        num_experts=num_experts,
        out_dtype=out_dtype,
    )
    backend = product.backend
    if isinstance(product, Linear):
        one = partial(matmul, out_dtype=out_dtype, backend=backend)
        return blocks(one, x, [(product.weight[...], 0)])
    zero, static = product.zero, product.x_scale
    operands = [(product.q[...], 0), (product.scale[...], 1)]
    operands += [] if zero is None else [(zero[...], 1)]

    def quantized(
        rows: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None = None
    ) -> jax.Array:
        weight = IntegerWeight(q, scale, zero, None if static is None else static[...])
        return quantized_product(rows, weight, product.kept, out_dtype=out_dtype, backend=backend)

    return blocks(quantized, x, operands)
