"""Every format of weights in both forms is the product of what its integers stand for."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor
from checkpoints.rounding import round_to_nearest
from jaxinfer.models.quantized_product import IntegerWeight, quantized_product
from pallas_kernels.backend import REFERENCE, Backend

ROWS, INPUTS, OUTPUTS = 3, 51, 20  # of no tile, group or packing
X_SCALE = np.float32(1.5 / 127)  # some of x are beyond it
FLOAT_ROWS = [
    WeightFormat(bits, group_size, has_zero=has_zero)
    for bits in (8, 4)
    for group_size in (None, 32, 64)
    for has_zero in (False, True)
]


def rounded(kept: WeightFormat) -> QTensor:
    weight = np.random.default_rng(0).normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
    return round_to_nearest(weight + 0.5, kept)


def held(weight: QTensor, *, is_unpacked: bool) -> dict[str, Any]:
    """As load_product.py places it."""
    if not is_unpacked or weight.format.bits == 8:
        return weight.parts()
    if weight.zero is None:
        return {"q": weight.q, "scale": weight.scale}
    size = weight.format.group_size or INPUTS
    middle = np.repeat(weight.zero.T, size, axis=1)[:, :INPUTS]
    return {"q": weight.q - middle, "scale": weight.scale}


def multiply(
    x: np.ndarray, parts: dict[str, Any], kept: WeightFormat, backend: Backend
) -> np.ndarray:
    product = partial(quantized_product, kept=kept, out_dtype=jnp.float32, backend=backend)
    return np.asarray(jax.jit(lambda x, parts: product(x, IntegerWeight(**parts)))(x, parts))


def rows() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(ROWS, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("form", ["reference", "interpret"])
@pytest.mark.parametrize("kept", FLOAT_ROWS, ids=lambda kept: kept.name)
def test_float_rows(kept: WeightFormat, form: str):
    backend = REFERENCE if form == "reference" else Backend("interpret")
    weight, x = rounded(kept), rows()
    got = multiply(x, held(weight, is_unpacked=form == "reference"), kept, backend)
    want = x.astype(np.float64) @ weight.dequantized().T
    kept_of_row = 2e-4 if form == "reference" else 1e-5  # two int8 terms, or floats
    np.testing.assert_allclose(got, want, rtol=0, atol=kept_of_row * np.abs(want).max())


@pytest.mark.parametrize("form", ["reference", "interpret"])
@pytest.mark.parametrize("is_static", [False, True])
def test_int8_rows(form: str, is_static: bool):
    """Rounded to their own scales, or to one, beyond which they are cut."""
    backend = REFERENCE if form == "reference" else Backend("interpret")
    kept = WeightFormat(8, activations="int8_static" if is_static else "int8")
    weight, x = rounded(kept), rows()
    own = {"x_scale": X_SCALE} if is_static else {}
    got = multiply(x, weight.parts() | own, kept, backend)
    scale = X_SCALE if is_static else np.abs(x).max(axis=1, keepdims=True) / 127
    xq = np.clip(np.rint(x / scale), -127, 127)
    assert (np.abs(x) > 127.5 * scale).any() == is_static
    want = (xq * scale).astype(np.float64) @ weight.dequantized().T
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-3 * np.abs(want).max())
