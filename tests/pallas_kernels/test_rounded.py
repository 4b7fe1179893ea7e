"""A product and the sum that takes it are two roundings, however many elements there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rounded import rounded


@pytest.mark.parametrize("size", [1, 8, 1000])
def test_a_sum_makes_no_multiply_add_of_it(size: int):
    a, b, c = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    found = jax.jit(lambda a, b, c: rounded(a * b) + c)(a, b, c)
    np.testing.assert_array_equal(found, a * b + c)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_no_number_stays_none_and_every_number_stays(dtype: str):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([0, -0.0, largest, -largest, jnp.inf, -jnp.inf, jnp.nan], dtype)
    found = jax.jit(rounded)(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found[:4]), np.asarray(x[:4]))
    assert not jnp.isfinite(found[4:]).any()
