"""Products of a mixture of experts in XLA's operations: a block of rows after the other, each by
the weights of its own expert.

Every block is the same product of the same size, so a row's bits do not depend on which block it is
in, and blocks that no row needs are not computed. A GPU has kernels instead
(expert_matmul_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

Operand = tuple[jax.Array, int]
"""An array of all experts' outputs one after the other, and the axis that they are on."""


def over_blocks(
    product: Callable[..., jax.Array],
    x: jax.Array,
    operands: Sequence[Operand],
    experts: jax.Array,
    num_blocks: jax.Array,
    *,
    num_experts: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """product(rows of a block, *the expert's part of each operand), block by block.

    Args:
        x: float[B * R, K], R rows for each of B blocks.
        operands: of a weight [X * N, K] its outputs are on axis 0, of scales [G, X * N] on axis 1.
        experts: int32[B], of 0 to X - 1.
        num_blocks: int32[], of these that have rows; the rows of others become 0.
    Returns: out_dtype[B * R, N].
    """
    num_rows = x.shape[0] // experts.shape[0]
    first, axis = operands[0]
    num_outputs = first.shape[axis] // num_experts

    def step(block: jax.Array, out: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(x, block * num_rows, num_rows)
        start = experts[block] * num_outputs
        own = (
            lax.dynamic_slice_in_dim(array, start, num_outputs, axis=axis)
            for array, axis in operands
        )
        return lax.dynamic_update_slice_in_dim(
            out, product(rows, *own).astype(out.dtype), block * num_rows, axis=0
        )

    start = jnp.zeros((x.shape[0], num_outputs), out_dtype)
    return lax.fori_loop(jnp.int32(0), num_blocks, step, start)
