"""RMSNorm: the kernel is interpreted; float64 is the judge, and a row's bits are its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.row_sum import row_sum

INTERPRET = Backend("interpret")
EPS = 1e-5
BOUNDS = {jnp.bfloat16: 5e-3, jnp.float32: 1e-6}

normed = jax.jit(rms_norm, static_argnames=("eps", "least_rows", "backend"))


def world(rows: int, width: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Rows of very different sizes; one is all zero."""
    rng = np.random.default_rng(width)
    x = rng.normal(size=(rows, width)) * 10 ** rng.uniform(-3, 3, (rows, 1))
    x[rows // 2] = 0
    return jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=width), dtype)


def relative_error(out: jax.Array, x: jax.Array, weight: jax.Array) -> float:
    wide = np.asarray(x, np.float64)
    root = np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS)
    want = wide / root * np.asarray(weight, np.float64)
    return float(np.abs(np.asarray(out, np.float64) - want).max() / np.abs(want).max())


@pytest.mark.parametrize("backend", [REFERENCE, INTERPRET], ids=lambda backend: backend.form)
@pytest.mark.parametrize(
    ("width", "dtype"), [(1, jnp.float32), (576, jnp.float32), (4096, jnp.bfloat16)]
)
def test_the_norm_is_the_norm(width: int, dtype: Any, backend: Backend):
    x, weight = world(9, width, dtype)
    out = normed(x, weight, eps=EPS, least_rows=8, backend=backend)
    assert out.dtype == x.dtype
    assert relative_error(out, x, weight) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(dtype: Any):
    x, weight = world(130, 200, dtype)
    want = np.asarray(normed(x, weight, eps=EPS, backend=INTERPRET))
    for rows in (1, 2, 7, 64):
        got = np.asarray(normed(x[-rows:], weight, eps=EPS, backend=INTERPRET))
        np.testing.assert_array_equal(got, want[-rows:])


def test_a_bad_row_leaves_the_others_alone():
    x, weight = world(8, 96, jnp.float32)
    bad = x.at[3].set(jnp.nan).at[4].set(jnp.inf)
    want, got = (normed(rows, weight, eps=EPS, backend=INTERPRET) for rows in (x, bad))
    others = np.array([0, 1, 2, 5, 6, 7])
    np.testing.assert_array_equal(np.asarray(got)[others], np.asarray(want)[others])
    assert np.isnan(np.asarray(got)[3]).all()


def test_the_reference_has_the_bits_of_the_models_norm():
    """As jaxinfer/models/layers.py had it before there was a kernel."""

    @jax.jit
    def models(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        total = row_sum(wide * wide, least_rows=8) + x.shape[-1] * EPS
        whole = wide * (lax.rsqrt(total) * x.shape[-1] ** 0.5)[:, None]
        return (whole * weight.astype(jnp.float32)[None, :]).astype(x.dtype)

    for rows, width in ((8, 96), (33, 576)):
        x, weight = world(rows, width, jnp.bfloat16)
        got = normed(x, weight, eps=EPS, least_rows=8)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(models(x, weight)))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((4,), (4,), r"x must be float\[T, E\]; got float32\[4\]"),
        ((4, 8), (4,), r"weight must be float\[8\]; got float32\[4\]"),
        ((4, 16385), (16385,), r"x must have rows of at most 16384 elements; got \(4, 16385\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(x: Any, weight: Any, message: str):
    with pytest.raises(ValueError, match=message):
        rms_norm(jnp.zeros(x), jnp.zeros(weight), eps=EPS, backend=INTERPRET)


def test_whole_numbers_are_refused():
    with pytest.raises(ValueError, match="x must be float"):
        rms_norm(jnp.zeros((2, 4), jnp.int32), jnp.zeros(4), eps=EPS)
