"""The dense product against float64, and a row's bits whatever stands beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import split_product
from pallas_kernels.backend import (
    DENSE_TILES,
    INT4_TILES,
    INT8_TILES,
    Backend,
    Form,
    Gpu,
    MatmulTiles,
)
from pallas_kernels.matmul import matmul
from tests.pallas_kernels.product_rows import NUM_ROWS, assert_rows_are_independent, relative_error

LIMITS = {jnp.bfloat16: 5e-3, jnp.float32: 1e-5}
run = jax.jit(matmul, static_argnames=("out_dtype", "backend"))


def interpret(gpu: Gpu, *, is_exact: bool = True) -> Backend:
    return Backend("interpret", gpu, is_exact)


def numbers(dtype: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def expected(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize(
    ("gpu", "dtype", "n", "k", "batches"),
    [
        ("sm_90", jnp.bfloat16, 192, 1536, (1, 8, 16, 24, 64)),
        ("sm_90", jnp.bfloat16, 100, 84, (8,)),
        ("sm_80", jnp.bfloat16, 192, 576, (8,)),
        ("sm_80", jnp.float32, 33, 600, (8,)),
    ],
)
def test_a_product_is_right_and_its_rows_are_independent(
    gpu: Gpu, dtype: Any, n: int, k: int, batches: tuple[int, ...]
):
    x, weight = numbers(dtype, NUM_ROWS, k), numbers(dtype, n, k)
    run_rows = partial(run, weight=weight, backend=interpret(gpu))
    assert relative_error(run_rows(x), expected(x, weight)) < LIMITS[dtype]
    assert_rows_are_independent(run_rows, x, batches)


@pytest.mark.parametrize("form", ["interpret", "reference"])
def test_the_result_is_rounded_once_to_the_type_that_is_asked_for(form: Form):
    x, weight = numbers(jnp.bfloat16, 8, 512), numbers(jnp.bfloat16, 64, 512)
    backend = Backend(form, "sm_80")
    wide = run(x, weight, backend=backend)
    out = run(x, weight, out_dtype=jnp.bfloat16, backend=backend)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("tiles", [DENSE_TILES, INT8_TILES, INT4_TILES])
def test_exact_tiles_of_one_product_share_their_depth_and_instruction(
    tiles: dict[Gpu, MatmulTiles],
):
    for gpu, choices in tiles.items():
        assert len({tile.depth for tile in choices.exact}) == 1
        if gpu == "sm_90":  # one 64-row instruction as wide as the tile per 4 warps
            assert all(tile.rows == 16 * tile.num_warps for tile in choices.exact)
            assert all(tile.rows >= 64 for tile in choices.exact)
            assert len({tile.cols for tile in choices.exact}) == 1


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
def test_splits_follow_from_the_weight_alone(gpu: Gpu):
    tiles = DENSE_TILES[gpu].exact
    for n, k in [(4096, 4096), (1024, 4096), (14336, 4096), (128256, 4096), (576, 576)]:
        steps = k // tiles[0].depth
        plans = [
            split_product.plan_product(tiles, (m, n), steps, tiles[0].depth, interpret(gpu))
            for m in (1, 8, 64, 65, 256, 4096)
        ]
        assert len({plan.split_steps for plan in plans}) == 1
        assert {plan.tile.depth for plan in plans} == {64}
        assert plans[0].is_in_grid == (plans[0].num_splits > 1)
        assert not plans[-1].is_in_grid


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
def test_one_block_adds_its_splits_as_many_blocks_do(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    x, weight = numbers(jnp.bfloat16, 24, 1344), numbers(jnp.bfloat16, 70, 1344)
    plan_product, plans = split_product.plan_product, []

    def plan_with(is_in_grid: bool, *args: Any) -> split_product.SplitPlan:
        plan = plan_product(*args)
        plans.append(plan)
        return split_product.SplitPlan(
            plan.tile, 24, 70, plan.num_steps, plan.split_steps, is_in_grid
        )

    def one_way(is_in_grid: bool) -> np.ndarray:
        monkeypatch.setattr(
            "pallas_kernels.split_product.plan_product", partial(plan_with, is_in_grid)
        )
        return np.asarray(jax.jit(partial(matmul, backend=interpret(gpu)))(x, weight))

    np.testing.assert_array_equal(one_way(True), one_way(False))
    assert [plan.num_splits for plan in plans] == [5, 5]
    assert plans[0].num_steps % plans[0].split_steps  # the last split is shorter


def test_a_backend_that_is_not_exact_takes_the_compilers_product():
    x, weight = numbers(jnp.bfloat16, 8, 64), numbers(jnp.bfloat16, 32, 64)
    backend = interpret("sm_90", is_exact=False)
    np.testing.assert_array_equal(run(x, weight, backend=backend), run(x, weight))


def test_the_reference_is_the_product_that_the_model_had():
    for dtype in LIMITS:
        x, weight = numbers(dtype, 8, 64), numbers(dtype, 32, 64)
        had = jax.jit(
            partial(
                lax.dot_general,
                dimension_numbers=(((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
        )
        np.testing.assert_array_equal(run(x, weight), had(x, weight))
        assert relative_error(run(x, weight), expected(x, weight)) < 1e-5


def zeros(dtype: Any, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("form", ["reference", "interpret", "pallas"])
@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (
            zeros(np.float32, 8),
            zeros(np.float32, 4, 8),
            r"x must be .*\[M, K\]; got float32 \(8,\)",
        ),
        (zeros(np.int8, 2, 8), zeros(np.int8, 4, 8), r"x must be bfloat16 or float32.*got int8"),
        (zeros(np.float32, 2, 8), zeros(np.float32, 8, 4), r"weight .*\[N, 8\].*got .*\(8, 4\)"),
        (zeros(np.float32, 2, 8), zeros(np.float32, 8), r"weight .*got float32 \(8,\)"),
        (zeros(np.float32, 2, 8), zeros(np.int8, 4, 8), r"weight must be float32 .*got int8"),
        (zeros(jnp.bfloat16, 2, 8), zeros(np.float32, 4, 8), r"weight must be bfloat16 .*got flo"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    form: Form, x: np.ndarray, weight: np.ndarray, message: str
):
    with pytest.raises(ValueError, match=message):
        matmul(jnp.asarray(x), jnp.asarray(weight), backend=Backend(form))
