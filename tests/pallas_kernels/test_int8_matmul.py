"""The product with an int8 weight against float64, and a row's bits whatever stands beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backend, Form, Gpu
from pallas_kernels.int8_matmul import int8_matmul
from tests.pallas_kernels.product_rows import (
    NUM_ROWS,
    assert_rows_are_independent,
    relative_error,
)

BATCHES = (1, 8, 16, 24, 64)
LIMITS = {jnp.bfloat16: 5e-3, jnp.float32: 1e-5}
run = jax.jit(int8_matmul, static_argnames=("out_dtype", "backend"))


def weight(n: int, k: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n + k)
    q = rng.integers(-128, 128, (n, k), np.int8)
    return q, rng.uniform(0.001, 0.1, (k // group_size, n)).astype(np.float32)


def numbers(dtype: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def expected(x: np.ndarray, q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    group_size = q.shape[1] // scale.shape[0]
    return x.astype(np.float64) @ (q * np.repeat(scale.T.astype(np.float64), group_size, 1)).T


@pytest.mark.parametrize(
    ("gpu", "dtype", "n", "k", "group_size", "batches"),
    [
        ("sm_90", jnp.bfloat16, 192, 1536, 128, (8,)),
        ("sm_80", jnp.bfloat16, 70, 84, 84, (8,)),
        ("sm_80", jnp.float32, 33, 544, 32, (8,)),
        pytest.param("sm_90", jnp.bfloat16, 576, 1536, 1536, BATCHES, marks=pytest.mark.slow),
        pytest.param("sm_80", jnp.bfloat16, 192, 576, 64, BATCHES, marks=pytest.mark.slow),
    ],
)
def test_a_product_is_right_and_its_rows_are_independent(
    gpu: Gpu, dtype: Any, n: int, k: int, group_size: int, batches: tuple[int, ...]
):
    x, (q, scale) = numbers(dtype, NUM_ROWS, k), weight(n, k, group_size)
    run_rows = partial(run, q=q, scale=scale, backend=Backend("interpret", gpu))
    assert relative_error(run_rows(x), expected(x, q, scale)) < LIMITS[dtype]
    assert_rows_are_independent(run_rows, x, batches)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("group_size", [32, 80 * 32])
def test_the_reference_is_right(dtype: Any, group_size: int):
    x, (q, scale) = numbers(dtype, 8, 80 * 32), weight(20, 80 * 32, group_size)
    assert relative_error(run(x, q, scale), expected(x, q, scale)) < 1e-5
    assert run(x, q, scale, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("group_size", [32, 320])
def test_rows_of_the_reference_are_independent(group_size: int):
    x, (q, scale) = numbers(jnp.bfloat16, NUM_ROWS, 320), weight(70, 320, group_size)
    assert_rows_are_independent(partial(run, q=q, scale=scale), x, (8, 64))


def test_a_backend_that_is_not_exact_is_right_too():
    x, (q, scale) = numbers(jnp.bfloat16, 8, 1536), weight(64, 1536, 128)
    out = run(x, q, scale, backend=Backend("interpret", "sm_90", is_exact=False))
    assert relative_error(out, expected(x, q, scale)) < 5e-3


def test_integers_without_rounding_are_exact():
    """Sums of a group below 2**24 and scales that are powers of two."""
    q, _ = weight(64, 512, 128)
    x = np.random.default_rng(0).integers(-8, 9, (8, 512)).astype(jnp.bfloat16)
    scale = np.exp2(np.random.default_rng(1).integers(-3, 3, (4, 64))).astype(np.float32)
    out = run(x, q, scale, backend=Backend("interpret"))
    np.testing.assert_array_equal(out, expected(x, q, scale))


def shaped(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("form", ["reference", "interpret", "pallas"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": shaped(jnp.int8, 2, 256)}, r"x must be bfloat16 or float32 \[M, K\]; got int8"),
        ({"x": shaped(jnp.float32, 2, 128)}, r"q must be int8 .* x \[M, K\] \(2, 128\); got int8"),
        ({"x": shaped(jnp.float32, 256)}, r"q must be .*\[M, K\] \(256,\)"),
        ({"q": shaped(jnp.uint8, 64, 256)}, r"q must be int8 .*got uint8 \(64, 256\)"),
        (
            {"scale": shaped(jnp.bfloat16, 2, 64)},
            r"scale must be float32 \[K/g, 64\]; got bfloat16",
        ),
        ({"scale": shaped(jnp.float32, 2, 60)}, r"scale must be .*64\]; got float32 \(2, 60\)"),
        ({"scale": shaped(jnp.float32, 3, 64)}, r"scale must have .*\[1, 8, 4, 2\] rows; got \(3"),
        ({"scale": shaped(jnp.float32, 16, 64)}, r"scale must have .*K = 256.*got \(16, 64\)"),
        ({"scale": shaped(jnp.float32, 0, 64)}, r"scale must have .*got \(0, 64\)"),
        (
            {"q": shaped(jnp.int8, 2**24, 256), "scale": shaped(jnp.float32, 1, 2**24)},
            r"q must have fewer than 2\*\*31 or more than 2\*\*32 bytes",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(form: Form, changes: dict[str, Any], message: str):
    arguments = {
        "x": shaped(jnp.bfloat16, 2, 256),
        "q": shaped(jnp.int8, 64, 256),
        "scale": shaped(jnp.float32, 2, 64),
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(int8_matmul, backend=Backend(form)), **(arguments | changes))
