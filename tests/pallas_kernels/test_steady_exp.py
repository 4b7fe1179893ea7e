"""The same bits however many numbers there are, and close to what they approximate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rounded import rounded
from pallas_kernels.steady_exp import HIGHEST, LOWEST, steady_exp, steady_sigmoid

FUNCTIONS = {
    steady_exp: lambda x: np.exp(x),
    steady_sigmoid: lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_within_rounding(function):
    x = np.linspace(LOWEST, HIGHEST, 200_001, dtype=np.float32)
    want = FUNCTIONS[function](x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(function(jnp.asarray(x))), want, rtol=3e-7)


def test_ends_and_what_is_no_number():
    x = jnp.array([0.0, -jnp.inf, -1e30, LOWEST, jnp.nan, jnp.inf], jnp.float32)
    zero, *low, nothing, high = np.asarray(steady_exp(x))
    assert zero == 1.0
    assert all(value == low[0] < 2e-38 for value in low)
    assert np.isnan(nothing)
    assert high == np.asarray(steady_exp(jnp.float32(HIGHEST)))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 60])
def test_a_row_has_the_same_bits_in_any_company(function, width: int):
    x = np.random.default_rng(0).normal(size=(256, width)).astype(np.float32) * 4
    run = jax.jit(
        lambda rows: rounded(function(rows) * 3.0) + rows
    )  # what follows is fused with it
    whole = np.asarray(run(x))
    for rows in (1, 8, 32, 64):
        found = np.concatenate([np.asarray(run(x[i : i + rows])) for i in range(0, 256, rows)])
        np.testing.assert_array_equal(found, whole)
