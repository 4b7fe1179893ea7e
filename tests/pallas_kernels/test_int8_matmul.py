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


class Weight:
    """Integers, their scales and zero points, and what they stand for."""

    def __init__(self, n: int, k: int, group_size: int, *, has_zero: bool = False):
        rng = np.random.default_rng(n + k)
        self.q = rng.integers(-128, 128, (n, k), np.int8)
        self.scale = rng.uniform(0.001, 0.1, (-(-k // group_size), n)).astype(np.float32)
        self.zero = rng.integers(-128, 128, self.scale.shape, np.int8) if has_zero else None
        self.group_size = group_size

    def expected(self, x: np.ndarray) -> np.ndarray:
        value = self.q.astype(np.float64)
        if self.zero is not None:
            value -= self.spread(self.zero)
        return x.astype(np.float64) @ (value * self.spread(self.scale)).T

    def run(self, x: np.ndarray, **options: Any) -> jax.Array:
        return run(x, self.q, self.scale, self.zero, **options)

    def spread(self, per_group: np.ndarray) -> np.ndarray:
        wide = np.repeat(per_group.T.astype(np.float64), self.group_size, 1)
        return wide[:, : self.q.shape[1]]


def numbers(dtype: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("gpu", "dtype", "n", "k", "group_size", "has_zero", "batches"),
    [
        ("sm_90", jnp.bfloat16, 192, 1500, 128, False, (8,)),
        ("sm_80", jnp.bfloat16, 70, 85, 85, True, (8,)),
        ("sm_80", jnp.float32, 33, 540, 32, True, (8,)),
        pytest.param("sm_90", jnp.bfloat16, 64, 600, 128, True, BATCHES, marks=pytest.mark.slow),
        pytest.param(
            "sm_90", jnp.bfloat16, 576, 1536, 1536, False, BATCHES, marks=pytest.mark.slow
        ),
        pytest.param("sm_80", jnp.bfloat16, 192, 576, 64, False, BATCHES, marks=pytest.mark.slow),
    ],
)
def test_a_product_is_right_and_its_rows_are_independent(
    gpu: Gpu,
    dtype: Any,
    n: int,
    k: int,
    group_size: int,
    has_zero: bool,
    batches: tuple[int, ...],
):
    x, weight = numbers(dtype, NUM_ROWS, k), Weight(n, k, group_size, has_zero=has_zero)
    run_rows = partial(weight.run, backend=Backend("interpret", gpu))
    assert relative_error(run_rows(x), weight.expected(x)) < LIMITS[dtype]
    assert_rows_are_independent(run_rows, x, batches)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("k", "group_size"), [(2550, 32), (2560, 2560)])
@pytest.mark.parametrize("has_zero", [False, True])
def test_the_reference_is_right(dtype: Any, k: int, group_size: int, has_zero: bool):
    x, weight = numbers(dtype, 8, k), Weight(20, k, group_size, has_zero=has_zero)
    assert relative_error(weight.run(x), weight.expected(x)) < 1e-5
    assert weight.run(x, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("group_size", [32, 320])
def test_rows_of_the_reference_are_independent(group_size: int):
    x, weight = numbers(jnp.bfloat16, NUM_ROWS, 320), Weight(70, 320, group_size)
    assert_rows_are_independent(weight.run, x, (8, 64))


def test_a_backend_that_is_not_exact_is_right_too():
    x, weight = numbers(jnp.bfloat16, 8, 1536), Weight(64, 1536, 128)
    out = weight.run(x, backend=Backend("interpret", "sm_90", is_exact=False))
    assert relative_error(out, weight.expected(x)) < 5e-3


def test_integers_without_rounding_are_exact():
    """Sums of a group below 2**24 and scales that are powers of two; zero points, too."""
    weight = Weight(64, 500, 128, has_zero=True)
    x = np.random.default_rng(0).integers(-8, 9, (8, 500)).astype(jnp.bfloat16)
    weight.scale = np.exp2(np.random.default_rng(1).integers(-3, 3, (4, 64))).astype(np.float32)
    out = weight.run(x, backend=Backend("interpret"))
    np.testing.assert_array_equal(out, weight.expected(x))


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
            r"scale must be float32 \[G, 64\]; got bfloat16",
        ),
        ({"scale": shaped(jnp.float32, 2, 60)}, r"scale must be .*64\]; got float32 \(2, 60\)"),
        ({"scale": shaped(jnp.float32, 3, 64)}, r"scale must have .*\[1, 8, 4, 2\] rows; got \(3"),
        ({"scale": shaped(jnp.float32, 16, 64)}, r"scale must have .*K = 256.*got \(16, 64\)"),
        ({"scale": shaped(jnp.float32, 0, 64)}, r"scale must have .*got \(0, 64\)"),
        ({"zero": shaped(jnp.int8, 1, 64)}, r"zero must be int8 \(2, 64\) like scale; got int8"),
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
