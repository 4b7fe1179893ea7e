"""A mixture of experts by the GPU's kernels, interpreted, against XLA's products of the numbers
that its weights stand for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.formats import Quantization, WeightFormat
from checkpoints.rounding import round_to_nearest
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.config import Experts
from jaxinfer.models.experts import SparseMLP
from pallas_kernels.backend import REFERENCE, Backend

DIM, SIZES = 40, Experts(5, 2, 24, normalizes=True)
X_SCALE = np.float32(0.04)  # of a static format
FORMATS = {
    "float": (None, 1e-5),  # and the error, of the largest result
    "int8 in groups": (WeightFormat(8, 32), 1e-5),
    "int4 with zero points": (WeightFormat(4, 32, has_zero=True), 1e-5),
    "int8 rows": (WeightFormat(8, activations="int8"), 0.03),
    "int8 rows, static": (WeightFormat(8, activations="int8_static"), 0.05),
}


class Layer:
    """jitted, with the same weights whatever the format and the backend."""

    def __init__(self, kept: WeightFormat | None, backend: Backend):
        quantization = None if kept is None else Quantization(kept)
        arithmetic = Arithmetic(jnp.dtype("float32"), backend, quantization)
        module = nnx.eval_shape(
            lambda: SparseMLP(DIM, SIZES, arithmetic=arithmetic, activation="silu")
        )
        graph, state = nnx.split(module)
        self.shapes = nnx.to_pure_dict(state)
        self.run = jax.jit(lambda params, x, is_token: nnx.merge(graph, params)(x, is_token))

    def __call__(self, params: Any, x: np.ndarray, is_token: np.ndarray | None = None) -> Any:
        assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, self.shapes)
        return np.asarray(self.run(params, x, is_token))


def parameters(kept: WeightFormat | None) -> tuple[Any, Any]:
    """As the format keeps them, and as the float numbers that they stand for."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.normal(size=(rows, cols)) * cols**-0.5).astype(np.float32)

    hidden, count = SIZES.intermediate_size, SIZES.count
    gate = {"weight": matrix(count, DIM)}
    weights = {
        "gate_proj": matrix(count * hidden, DIM),
        "up_proj": matrix(count * hidden, DIM),
        "down_proj": matrix(count * DIM, hidden),
    }
    plain = {name: {"weight": weight} for name, weight in weights.items()}
    if kept is None:
        floats = {"gate": gate, "experts": plain}
        return floats, floats
    rounded = {name: round_to_nearest(weight, kept) for name, weight in weights.items()}
    meant = {name: {"weight": tensor.dequantized()} for name, tensor in rounded.items()}
    static = {"x_scale": X_SCALE} if kept.activations == "int8_static" else {}
    parts = {name: tensor.parts() | static for name, tensor in rounded.items()}
    return {"gate": gate, "experts": parts}, {"gate": gate, "experts": meant}


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, DIM)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernels_compute_what_the_weights_stand_for(name: str):
    kept, error = FORMATS[name]
    params, meant = parameters(kept)
    x = rows(40)
    got = Layer(kept, Backend("interpret"))(params, x)
    want = Layer(None, REFERENCE)(meant, x)
    np.testing.assert_allclose(got, want, rtol=0, atol=error * np.abs(want).max())


@pytest.mark.parametrize("name", ["float", pytest.param("int8 rows", marks=pytest.mark.slow)])
def test_a_token_has_the_same_bits_in_any_company(name: str):
    """Its experts' blocks have 8 or 32 rows here, and few or all of the tokens."""
    kept, _ = FORMATS[name]
    layer, (params, _) = Layer(kept, Backend("interpret", "sm_80")), parameters(kept)
    x = rows(80)
    whole = layer(params, x)
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(layer(params, x[40:48]), whole[40:48])
    alone = layer(params, x[40:48], np.arange(8) == 3)
    np.testing.assert_array_equal(alone[3], whole[43])
    same = layer(params, np.repeat(x[3:4], 80, axis=0))
    np.testing.assert_array_equal(same, np.repeat(whole[3:4], 80, axis=0))
