"""Products of integers against float64, and that few rows get the bits of many."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.integer_matmul import WIDTH_PER_ROW, integer_matmul

NUM_ROWS, WIDTH, NUM_OUT = 40, 96, 24
PRODUCT = jax.jit(integer_matmul, static_argnames=("group_size", "num_terms"))
FEW = WIDTH // WIDTH_PER_ROW  # rows of one term that are the second operand of a product


def world(group_size: int | None, *, has_zero: bool) -> dict[str, jax.Array]:
    random = np.random.default_rng(7)
    groups = -(-WIDTH // (group_size or WIDTH))
    arrays = {
        "x": random.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32),
        "q": random.integers(-127, 128, (NUM_OUT, WIDTH), np.int8),
        "scale": random.uniform(0.01, 0.02, (groups, NUM_OUT)).astype(np.float32),
    }
    if has_zero:
        arrays["zero"] = random.integers(-8, 8, (groups, NUM_OUT), np.int8)
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def run(
    arrays: dict[str, jax.Array],
    *,
    group_size: int | None = None,
    num_terms: Literal[1, 2] = 2,
    rows: slice = slice(None),
) -> np.ndarray:
    given = {**arrays, "x": arrays["x"][rows]}
    return np.asarray(PRODUCT(**given, group_size=group_size, num_terms=num_terms))


def in_float64(arrays: dict[str, jax.Array], group_size: int | None) -> np.ndarray:
    group = np.arange(WIDTH) // (group_size or WIDTH)
    x, q, scale = (np.asarray(arrays[name], np.float64) for name in ("x", "q", "scale"))
    zero = np.asarray(arrays.get("zero", np.zeros(scale.shape)), np.float64)
    return x @ ((q - zero[group].T) * scale[group].T).T


FORMATS = [(None, False), (40, False), (40, True)]  # 40: a tail of 16


@pytest.mark.parametrize(("group_size", "has_zero"), FORMATS)
@pytest.mark.parametrize("num_terms", [1, 2])
def test_a_product_is_that_of_floats_to_the_bits_of_its_terms(
    num_terms: Literal[1, 2], group_size: int | None, has_zero: bool
):
    arrays = world(group_size, has_zero=has_zero)
    got = run(arrays, group_size=group_size, num_terms=num_terms)
    want = in_float64(arrays, group_size)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < {1: 2**-6, 2: 2**-14}[num_terms]


@pytest.mark.parametrize(("group_size", "has_zero"), FORMATS)
@pytest.mark.parametrize("num_terms", [1, 2])
def test_few_rows_and_many_multiplied_the_other_way_round_get_the_same_bits(
    num_terms: Literal[1, 2], group_size: int | None, has_zero: bool
):
    arrays = world(group_size, has_zero=has_zero)
    many = run(arrays, group_size=group_size, num_terms=num_terms)
    for start in range(0, NUM_ROWS, FEW // 2):
        rows = slice(start, start + FEW // 2)
        few = run(arrays, group_size=group_size, num_terms=num_terms, rows=rows)
        np.testing.assert_array_equal(few, many[rows])


def test_few_rows_are_the_second_operand_and_many_the_first():
    arrays = world(None, has_zero=False)

    def text(num_rows: int) -> str:
        given = {**arrays, "x": arrays["x"][:num_rows]}
        return PRODUCT.lower(**given, num_terms=1).as_text()

    assert f"tensor<{NUM_OUT}x{FEW}xi32>" in text(FEW)
    assert f"tensor<{NUM_OUT}x{FEW + 1}xi32>" not in text(FEW + 1)


@pytest.mark.parametrize("x_scale", [None, 0.03])
@pytest.mark.parametrize("num_terms", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_becomes_nan_and_the_others_keep_their_bits(
    bad: float, num_terms: Literal[1, 2], x_scale: float | None
):
    arrays = world(None, has_zero=False)
    if x_scale is not None:
        arrays["x_scale"] = jnp.float32(x_scale)
    want = run(arrays, num_terms=num_terms)
    broken = {**arrays, "x": arrays["x"].at[3, 5].set(bad)}
    got = run(broken, num_terms=num_terms)
    assert np.isnan(got[3]).all()
    others = np.arange(NUM_ROWS) != 3
    np.testing.assert_array_equal(got[others], want[others])


def test_a_sum_with_a_product_adds_what_it_is_alone():
    arrays = world(None, has_zero=False)
    rest = jnp.asarray(np.random.default_rng(8).standard_normal((NUM_ROWS, NUM_OUT)), jnp.float32)
    together = jax.jit(lambda given: rest + integer_matmul(**given))(arrays)
    np.testing.assert_array_equal(np.asarray(together), run(arrays) + np.asarray(rest))


def test_a_row_of_zeros_is_zeros():
    arrays = world(40, has_zero=True)
    arrays["x"] = arrays["x"].at[3].set(0.0)
    assert not run(arrays, group_size=40)[3].any()
