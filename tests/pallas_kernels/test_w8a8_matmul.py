"""The product of int8 rows and an int8 weight is exact, and rows are quantized each for itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backend, Form, Gpu
from pallas_kernels.w8a8_matmul import quantize_rows, w8a8_matmul
from tests.pallas_kernels.product_rows import NUM_ROWS, assert_rows_are_independent

run = jax.jit(w8a8_matmul, static_argnames=("out_dtype", "backend"))
quantize = jax.jit(quantize_rows)


def integers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-128, 128, shape, np.int8)


def scales(size: int) -> np.ndarray:
    return np.random.default_rng(size).uniform(0.001, 0.1, size).astype(np.float32)


def expected(xq: np.ndarray, x_scale: np.ndarray, q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Exact integers, then one rounding to float32 and one for each scale."""
    total = (xq.astype(np.int64) @ q.T.astype(np.int64)).astype(np.float32)
    return (total * x_scale[:, None]) * scale[None, :]


@pytest.mark.parametrize(
    ("form", "gpu", "m", "n", "k"),
    [
        ("reference", "sm_90", 8, 100, 576),
        ("interpret", "sm_90", 24, 192, 1536),
        ("interpret", "sm_90", 40, 33, 84),
        ("interpret", "sm_80", 130, 100, 576),
    ],
)
def test_a_product_is_exact(form: Form, gpu: Gpu, m: int, n: int, k: int):
    xq, q, x_scale, scale = integers(m, k), integers(n, k), scales(m), scales(n)
    out = run(xq, x_scale, q, scale, backend=Backend(form, gpu))
    np.testing.assert_array_equal(out, expected(xq, x_scale, q, scale))


def test_the_largest_sum_fits():
    k = 131071
    xq, q = np.full((1, k), -128, np.int8), np.full((2, k), -128, np.int8)
    one = np.ones(2, np.float32)
    out = run(xq, one[:1], q, one, backend=Backend("interpret"))
    np.testing.assert_array_equal(out, np.full((1, 2), k * 2.0**14, np.float32))


def test_quantized_rows_are_independent_through_the_product():
    x = np.random.default_rng(0).normal(size=(NUM_ROWS, 320)).astype(np.float32)
    q, scale = integers(70, 320), scales(70)

    def run_rows(rows: np.ndarray) -> jax.Array:
        return run(*quantize(rows), q, scale, backend=Backend("interpret"))

    assert_rows_are_independent(run_rows, x, (8,))


def test_a_row_is_about_its_integers_times_its_scale():
    x = np.random.default_rng(0).normal(size=(16, 100)).astype(jnp.bfloat16)
    xq, scale = (np.asarray(part) for part in quantize(x))
    assert (xq.dtype, scale.dtype) == (np.int8, np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(scale, np.abs(wide).max(1) / 127, rtol=2**-14)
    assert (np.abs(xq).max(1) == 127).all()
    assert (np.abs(xq * scale[:, None].astype(np.float64) - wide) <= scale[:, None] * 0.5001).all()


def test_a_row_of_zeros_stays_zero_and_one_that_is_not_finite_gives_nothing_finite():
    x = np.zeros((4, 32), np.float32)
    x[1, 3], x[2, 5], x[3, 7] = np.nan, np.inf, 1e-40
    xq, x_scale = quantize(x)
    out = np.asarray(run(xq, x_scale, np.ones((8, 32), np.int8), np.ones(8, np.float32)))
    assert (out[0] == 0).all()
    assert not np.isfinite(out[1:3]).any()
    assert np.abs(out[3]).max() <= 1e-38


def test_rows_of_one_scale_are_cut_at_127_of_it():
    x = np.array([[0.5, -0.26, 100.0, -100.0], [0.0, 0.125, 0.375, -63.5]], np.float32)
    xq, x_scale = jax.jit(quantize_rows)(x, np.float32(0.5))
    assert np.asarray(xq).tolist() == [[1, -1, 127, -127], [0, 0, 1, -127]]
    assert np.asarray(x_scale).tolist() == [0.5, 0.5]


def test_a_row_that_is_not_finite_gives_nothing_finite_under_a_static_scale_either():
    x = np.ones((3, 32), np.float32)
    x[0, 3], x[1, 5] = np.nan, -np.inf
    xq, x_scale = jax.jit(quantize_rows)(x, np.float32(0.01))
    out = np.asarray(run(xq, x_scale, np.ones((8, 32), np.int8), np.ones(8, np.float32)))
    assert not np.isfinite(out[:2]).any()
    np.testing.assert_allclose(out[2], 32.0, rtol=1e-3)


@pytest.mark.parametrize("is_static", [False, True])
def test_rows_round_as_if_divided_exactly(is_static: bool):
    """So that no device's division shows: halves of the scale, and numbers just beside them."""
    scale = np.float32(0.0123) if is_static else None
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    _, first = (np.asarray(part) for part in jax.jit(quantize_rows)(x, scale))
    halves = np.float32(first[:, None] * (np.arange(128) - 63.5))
    beside = [np.nextafter(halves, np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.choose(np.random.default_rng(1).integers(0, 3, x.shape), [halves, *beside])
    xq, x_scale = (np.asarray(part) for part in jax.jit(quantize_rows)(x, scale))
    exact = np.rint(x.astype(np.float64) / x_scale[:, None].astype(np.float64))
    np.testing.assert_array_equal(xq, np.clip(exact, -127, 127))


def shaped(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("form", ["reference", "interpret", "pallas"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"xq": shaped(jnp.float32, 2, 64)}, r"xq must be int8 \[M, K\]; got float32 \(2, 64\)"),
        ({"xq": shaped(jnp.int8, 64)}, r"xq must be .*got int8 \(64,\)"),
        ({"xq": shaped(jnp.int8, 2, 32)}, r"q must be int8 \[N, 32\] .*got int8 \(8, 64\)"),
        ({"q": shaped(jnp.uint8, 8, 64)}, r"q must be int8 .*got uint8"),
        ({"x_scale": shaped(jnp.float32, 2, 1)}, r"x_scale must be float32 \(2,\); got .*\(2, 1\)"),
        ({"x_scale": shaped(jnp.bfloat16, 2)}, r"x_scale must be float32 .*got bfloat16"),
        ({"scale": shaped(jnp.float32, 1, 8)}, r"scale must be float32 \(8,\); got float32 \(1, 8"),
        (
            {"xq": shaped(jnp.int8, 2, 2**17), "q": shaped(jnp.int8, 8, 2**17)},
            "xq may have K up to 131071, .* got 131072",
        ),
        (
            {"q": shaped(jnp.int8, 2**25, 64), "scale": shaped(jnp.float32, 2**25)},
            r"q must have fewer than 2\*\*31 or more than 2\*\*32 bytes",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(form: Form, changes: dict[str, Any], message: str):
    arguments = {
        "xq": shaped(jnp.int8, 2, 64),
        "x_scale": shaped(jnp.float32, 2),
        "q": shaped(jnp.int8, 8, 64),
        "scale": shaped(jnp.float32, 8),
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(w8a8_matmul, backend=Backend(form)), **(arguments | changes))


def test_only_rows_of_floats_are_quantized():
    with pytest.raises(ValueError, match=r"x must be floats \[M, K\]; got int8 \(2, 4\)"):
        quantize_rows(jnp.zeros((2, 4), jnp.int8))
