"""A sparse layer against a plain one in numpy: routing, weights, ties, and rows in any company."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.formats import Quantization, WeightFormat
from checkpoints.qtensor import QTensor
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.config import Experts
from jaxinfer.models.experts import SparseMLP

DIM = 20
SIZES = {
    "normalized": Experts(5, 2, 24, normalizes=True),
    "not normalized": Experts(7, 3, 16, normalizes=False),
    "shared": Experts(4, 1, 24, normalizes=False, shared_intermediate_size=12),
}
FORMATS = {
    "float": None,
    "int8": WeightFormat(8),
    "int8 rows": WeightFormat(8, activations="int8"),
    "int4 in groups": WeightFormat(4, 32, has_zero=True),
}
QUICK = ("float", "int4 in groups")


class Sparse:
    """A layer with random parameters."""

    def __init__(self, sizes: Experts, kept: WeightFormat | None = None, seed: int = 0):
        quantization = None if kept is None else Quantization(kept)
        arithmetic = Arithmetic(jnp.dtype("float32"), quantization=quantization)
        module = nnx.eval_shape(
            lambda: SparseMLP(DIM, sizes, arithmetic=arithmetic, activation="silu")
        )
        self.graph, state = nnx.split(module)
        rng = np.random.default_rng(seed)

        def filled(shape: jax.ShapeDtypeStruct) -> jax.Array:
            if shape.dtype == "int8":
                return jnp.asarray(rng.integers(-7, 8, shape.shape, np.int8))
            values = rng.normal(size=shape.shape) * shape.shape[-1] ** -0.5
            return jnp.asarray(
                np.abs(values) if kept and shape.shape[0] == 1 else values, "float32"
            )

        self.params: Any = jax.tree.map(filled, nnx.to_pure_dict(state))
        self.sizes, self.kept = sizes, kept
        self.run = jax.jit(lambda params, x, is_token: nnx.merge(self.graph, params)(x, is_token))

    def __call__(self, x: np.ndarray, is_token: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(self.run(self.params, x, is_token))


def plain(params: Any, sizes: Experts, x: np.ndarray) -> np.ndarray:
    """The same, token by token, in float64."""

    def weight(*path: str) -> np.ndarray:
        found = params
        for key in path:
            found = found[key]
        return np.asarray(found["weight"], np.float64)

    def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        inner = x @ gate.T
        return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T

    parts = [weight("experts", f"{name}_proj") for name in ("gate", "up", "down")]
    parts = [part.reshape(sizes.count, -1, part.shape[1]) for part in parts]
    out = []
    for row in x.astype(np.float64):
        likely = np.exp(row @ weight("gate").T)
        likely /= likely.sum()
        chosen = np.argsort(-likely, kind="stable")[: sizes.per_token]
        total = likely[chosen].sum() if sizes.normalizes else 1.0
        y = sum(likely[i] / total * gated(row, *(part[i] for part in parts)) for i in chosen)
        if sizes.shared_intermediate_size:
            shared = [weight("shared_expert", f"{name}_proj") for name in ("gate", "up", "down")]
            y = y + gated(row, *shared) / (1 + np.exp(-row @ weight("shared_expert_gate")[0]))
        out.append(y)
    return np.array(out)


def rows(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


@pytest.mark.parametrize("name", SIZES)
def test_it_computes_what_the_papers_say(name: str):
    layer, x = Sparse(SIZES[name]), rows(40)
    want = plain(layer.params, SIZES[name], x)
    np.testing.assert_allclose(layer(x), want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize(
    "kept",
    [kept if kept in QUICK else pytest.param(kept, marks=pytest.mark.slow) for kept in FORMATS],
)
def test_a_row_has_the_same_bits_in_any_company(kept: str):
    layer, x = Sparse(SIZES["not normalized"], FORMATS[kept]), rows(256)
    whole = layer(x)
    assert np.isfinite(whole).all()
    for count in (8, 64):
        parts = [layer(x[start : start + count]) for start in range(0, 256, count)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    alone = layer(x[:8], np.arange(8) == 3)
    np.testing.assert_array_equal(alone[3], whole[3])
    same = layer(np.repeat(x[3:4], 64, axis=0))  # all tokens want the same experts
    np.testing.assert_array_equal(same, np.repeat(whole[3:4], 64, axis=0))


def test_of_equal_experts_the_first_are_taken():
    layer, x = Sparse(SIZES["normalized"]), rows(8)
    layer.params["gate"]["weight"] = jnp.zeros_like(layer.params["gate"]["weight"])
    usual = layer(x)
    down = np.array(layer.params["experts"]["down_proj"]["weight"]).reshape(5, DIM, -1)
    down[2:] = 7.0
    layer.params["experts"]["down_proj"]["weight"] = jnp.asarray(down.reshape(5 * DIM, -1))
    np.testing.assert_array_equal(layer(x), usual)


@pytest.mark.parametrize("kept", ["int8", "int4 in groups"])
def test_quantized_experts_are_those_of_their_numbers(kept: str):
    sizes, form = SIZES["normalized"], FORMATS[kept]
    assert form is not None
    layer, x = Sparse(sizes, form), rows(16)
    plain_params: Any = {"gate": layer.params["gate"], "experts": {}}
    for name, part in layer.params["experts"].items():
        unpacked = QTensor(
            np.asarray(part["q"]), np.asarray(part["scale"]), None, WeightFormat(8, form.group_size)
        )
        plain_params["experts"][name] = {"weight": unpacked.dequantized()}
    want = plain(plain_params, sizes, x)
    np.testing.assert_allclose(layer(x), want, rtol=0, atol=2e-3 * np.abs(want).max())
