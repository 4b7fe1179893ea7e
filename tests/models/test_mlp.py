"""The MLP of integer products takes many rows in blocks, and a row's bits do not show it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.formats import Quantization, WeightFormat
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.layers import MLP, ROWS_AT_ONCE

DIM, HIDDEN_DIM = 48, 80
FEW = 8


def test_a_row_among_blocks_has_the_bits_that_it_has_among_few():
    quantization = Quantization(WeightFormat(8))
    arithmetic = Arithmetic(jnp.dtype("float32"), quantization=quantization)
    module = nnx.eval_shape(lambda: MLP(DIM, HIDDEN_DIM, use_bias=False, arithmetic=arithmetic))
    graph, shapes = nnx.split(module)
    random = np.random.default_rng(0)

    def filled(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == "int8":
            return jnp.asarray(random.integers(-127, 128, shape.shape, np.int8))
        return jnp.asarray(random.uniform(0.001, 0.002, shape.shape).astype(np.float32))

    params = jax.tree.map(filled, shapes)
    # Summed as a layer does; the parameters are arguments, or XLA would see through their selects.
    step = jax.jit(lambda params, x: x + nnx.merge(graph, params)(x))
    mlp = partial(step, params)
    x = random.standard_normal((3 * ROWS_AT_ONCE, DIM)).astype(np.float32)
    assert "while" in step.lower(params, x).as_text()
    many = np.asarray(mlp(x))
    for start in range(0, len(x), 6 * FEW):
        rows = slice(start, start + FEW)
        np.testing.assert_array_equal(np.asarray(mlp(x[rows])), many[rows])
