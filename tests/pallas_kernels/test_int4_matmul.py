"""Packing of int4, the product with it against float64, and rows that do not depend on others."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import qtensor
from pallas_kernels.backend import Backend, Form, Gpu
from pallas_kernels.int4_matmul import int4_matmul, pack_int4, unpack_int4
from tests.pallas_kernels.product_rows import (
    NUM_ROWS,
    assert_rows_are_independent,
    relative_error,
)

BATCHES = (1, 8, 16, 24, 64)
LIMITS = {jnp.bfloat16: 5e-3, jnp.float32: 1e-5}
run = jax.jit(int4_matmul, static_argnames=("out_dtype", "backend"))


class Weight:
    """Values, their scales and zero points, and what they stand for."""

    def __init__(self, n: int, k: int, group_size: int, *, has_zero: bool):
        rng = np.random.default_rng(n + k)
        values = rng.integers(0, 16, (n, k), np.int8) - np.int8(0 if has_zero else 8)
        self.scale = rng.uniform(0.001, 0.1, (-(-k // group_size), n)).astype(np.float32)
        self.zero = rng.integers(0, 16, self.scale.shape, np.int8) if has_zero else None
        self.packed = qtensor.pack_int4(values, group_size if group_size < k else None)
        if self.zero is not None:
            values = values - np.repeat(self.zero.T, group_size, 1)[:, :k]
        self.value = values * np.repeat(self.scale.T.astype(np.float64), group_size, 1)[:, :k]

    def expected(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64) @ self.value.T

    def run(self, x: np.ndarray, **options: Any) -> jax.Array:
        return run(x, self.packed, self.scale, self.zero, **options)


def numbers(dtype: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("group_size", [2, 32, 96])
@pytest.mark.parametrize("is_signed", [True, False])
def test_what_is_packed_is_unpacked(group_size: int, is_signed: bool):
    values = np.random.default_rng(0).integers(0, 16, (5, 96), np.int8) - np.int8(8 * is_signed)
    packed = pack_int4(values, group_size)
    assert (packed.dtype, packed.shape) == (jnp.int8, (5, 48))
    np.testing.assert_array_equal(unpack_int4(packed, group_size, is_signed=is_signed), values)


def test_a_byte_holds_an_element_and_the_one_half_a_group_later():
    values = np.array([[1, 2, -3, -8, 7, 0, 4, -1]], np.int8)
    packed = np.asarray(pack_int4(values, 4)).view(np.uint8)
    assert packed.tolist() == [[0xD1, 0x82, 0x47, 0xF0]]


@pytest.mark.parametrize(
    ("values", "group_size", "message"),
    [
        (np.full((1, 4), 8) - 16 * (np.arange(4) > 1), 4, "of -8..7 or of 0..15; got -8 to 8"),
        (np.full((1, 4), 16), 4, r"values must be .*got 16 to 16, \(1, 4\)"),
        (np.full((1, 4), -9), 4, "got -9 to -9"),
        (np.zeros((1, 6)), 4, "group_size must be even and divide K = 6; got 4"),
        (np.zeros((1, 6)), 3, "must be even .*got 3"),
        (np.zeros((1, 6)), 0, "must be even .*got 0"),
        (np.zeros(6), 2, r"values must be int8 \[N, K\]; got int8 \(6,\)"),
    ],
)
def test_what_cannot_be_packed_is_refused(values: np.ndarray, group_size: int, message: str):
    with pytest.raises(ValueError, match=message):
        pack_int4(values.astype(np.int8), group_size)


@pytest.mark.parametrize(
    ("gpu", "dtype", "n", "k", "group_size", "has_zero", "batches"),
    [
        ("sm_90", jnp.bfloat16, 192, 1540, 128, False, (8,)),
        ("sm_90", jnp.bfloat16, 70, 85, 85, True, (8,)),
        ("sm_80", jnp.bfloat16, 70, 565, 64, True, (8,)),
        pytest.param("sm_90", jnp.bfloat16, 64, 600, 128, True, BATCHES, marks=pytest.mark.slow),
        pytest.param("sm_80", jnp.float32, 33, 544, 32, True, BATCHES, marks=pytest.mark.slow),
        pytest.param("sm_80", jnp.bfloat16, 64, 576, 576, False, BATCHES, marks=pytest.mark.slow),
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
@pytest.mark.parametrize(
    ("k", "group_size", "has_zero"), [(625, 32, True), (640, 640, False), (641, 641, True)]
)
def test_the_reference_is_right(dtype: Any, k: int, group_size: int, has_zero: bool):
    x, weight = numbers(dtype, 8, k), Weight(20, k, group_size, has_zero=has_zero)
    assert relative_error(weight.run(x), weight.expected(x)) < 1e-5
    assert weight.run(x, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_zero_points_are_subtracted_without_rounding():
    weight = Weight(64, 512, 128, has_zero=True)
    weight.value, weight.scale = weight.value / np.repeat(weight.scale.T, 128, 1), weight.scale * 0
    weight.scale += 1
    x = np.random.default_rng(0).integers(-8, 9, (8, 512)).astype(jnp.bfloat16)
    out = weight.run(x, backend=Backend("interpret"))
    np.testing.assert_array_equal(out, weight.expected(x).round())


@pytest.mark.parametrize("form", ["reference", "interpret"])
def test_a_group_that_all_of_k_does_not_fill_is_one(form: Form):
    values = np.random.default_rng(0).integers(-7, 8, (8, 48), np.int8)
    x, one = numbers(jnp.float32, 8, 48), np.ones((1, 8), np.float32)
    out = run(x, qtensor.pack_int4(values, 128), one, backend=Backend(form))
    np.testing.assert_allclose(out, x @ values.T, rtol=1e-5, atol=1e-4)


def shaped(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("form", ["reference", "interpret", "pallas"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": shaped(jnp.int8, 2, 256)}, r"x must be bfloat16 or float32 \[M, K\]; got int8"),
        (
            {"x": shaped(jnp.float32, 2, 128)},
            r"packed must be int8 \[N, K/2\] for .*\(2, 128\).*: 64 bytes a row",
        ),
        (
            {"packed": shaped(jnp.int8, 64, 256)},
            r"packed must be .*: 128 bytes a row; got \(64, 256\)",
        ),
        ({"packed": shaped(jnp.uint8, 64, 128)}, r"packed must be int8 .*got uint8"),
        ({"scale": shaped(jnp.float32, 2, 60)}, r"scale must be .*64\]; got float32 \(2, 60\)"),
        ({"scale": shaped(jnp.float32, 3, 64)}, r"scale must have .*\[1, 8, 4, 2\] rows; got \(3"),
        (
            {"zero": shaped(jnp.int8, 1, 64)},
            r"zero must be int8 \(2, 64\) like scale; got int8 \(1",
        ),
        ({"zero": shaped(jnp.uint8, 2, 64)}, r"zero must be int8 .*got uint8 \(2, 64\)"),
        (
            {"packed": shaped(jnp.int8, 2**25, 128), "scale": shaped(jnp.float32, 1, 2**25)},
            r"packed must have fewer than 2\*\*31 or more than 2\*\*32 bytes",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(form: Form, changes: dict[str, Any], message: str):
    arguments = {
        "x": shaped(jnp.bfloat16, 2, 256),
        "packed": shaped(jnp.int8, 64, 128),
        "scale": shaped(jnp.float32, 2, 64),
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(int4_matmul, backend=Backend(form)), **(arguments | changes))


def test_packed_bytes_of_another_type_are_not_unpacked():
    with pytest.raises(ValueError, match=r"packed must be int8 \[N, K/2\]; got uint8"):
        unpack_int4(jnp.zeros((2, 4), jnp.uint8), 8)
