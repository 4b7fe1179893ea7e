"""The bits of a sum do not depend on how many rows are summed beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.row_sum import SAME_ORDER_FROM, row_sum

ROWS = (8, 9, 32, 128, 1024)
FOLDED = (1, 3, 48, 100, 128, 420, 500)
LONG = (512, 576, 5000)  # 8 rows of these are past SAME_ORDER_FROM


INTERPRET = Backend("interpret")


@partial(jax.jit, static_argnames=("least_rows", "backend"))
def summed(x: jax.Array, least_rows: int = 1, backend: Backend = REFERENCE) -> jax.Array:
    return row_sum(x, least_rows=least_rows, backend=backend)


def numbers(width: int, rows: int = max(ROWS)) -> np.ndarray:
    """Of very different sizes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(width)
    return (rng.normal(size=(rows, width)) * 10 ** rng.uniform(-3, 3, (rows, width))).astype(
        np.float32
    )


@pytest.mark.parametrize("width", [*FOLDED, *LONG])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(width: int):
    x = numbers(width)
    want = np.asarray(summed(x, least_rows=8))
    for rows in ROWS:
        np.testing.assert_array_equal(summed(x[:rows], least_rows=8), want[:rows])


@pytest.mark.parametrize("width", [1, 48, 576])
def test_a_row_alone_has_the_same_bits_when_sums_are_always_folded(width: int):
    x = numbers(width, 32)
    want = np.asarray(summed(x, least_rows=1))
    for rows in (1, 2, 7, 8):
        np.testing.assert_array_equal(summed(x[:rows], least_rows=1), want[:rows])


@pytest.mark.parametrize("width", [*FOLDED, *LONG])
def test_the_sum_is_the_sum(width: int):
    x = numbers(width, 64)
    exact = x.astype(np.float64).sum(axis=1)
    bound = np.abs(x).astype(np.float64).sum(axis=1) * 1e-6
    assert (np.abs(np.asarray(summed(x, least_rows=8)) - exact) <= bound).all()


@pytest.mark.parametrize("width", [1, 7, 576, 40_000])
def test_the_kernels_sum_is_the_sum(width: int):
    """The widest rows are of three blocks, whose sums are summed by a second launch."""
    x = numbers(width, 5)
    exact = x.astype(np.float64).sum(axis=1)
    bound = np.abs(x).astype(np.float64).sum(axis=1) * 1e-6
    assert (np.abs(np.asarray(summed(x, backend=INTERPRET)) - exact) <= bound).all()


@pytest.mark.parametrize("width", [300, 20_000])
def test_bits_of_the_kernels_sum_do_not_depend_on_the_number_of_rows(width: int):
    x = numbers(width, 130)
    want = np.asarray(summed(x, backend=INTERPRET))
    for rows in (1, 2, 31):
        got = np.asarray(summed(x[-rows:], backend=INTERPRET))
        np.testing.assert_array_equal(got, want[-rows:])


@pytest.mark.parametrize("backend", [REFERENCE, INTERPRET], ids=lambda backend: backend.form)
def test_leading_axes_are_kept(backend: Backend):
    x = numbers(40, 24).reshape(2, 3, 4, 40)
    got = summed(jnp.asarray(x), backend=backend)
    want = summed(jnp.asarray(x.reshape(24, 40)), backend=backend)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want).reshape(2, 3, 4))


@pytest.mark.parametrize(("shape", "dtype"), [((), jnp.float32), ((2, 3), jnp.bfloat16)])
def test_what_the_kernel_is_not_for_is_refused(shape: tuple[int, ...], dtype: Any):
    with pytest.raises(ValueError, match=r"x must be float32\[..., D\]; got"):
        row_sum(jnp.zeros(shape, dtype), backend=INTERPRET)


def test_rows_are_folded_only_where_few_of_them_could_be_summed():
    """Long rows keep the compiler's reduction; the number of rows that are there does not count."""
    width = SAME_ORDER_FROM // 8

    def has_reduction(rows: int, width: int) -> bool:
        text = summed.lower(jax.ShapeDtypeStruct((rows, width), np.float32), least_rows=8).as_text()
        return "stablehlo.reduce" in text

    assert has_reduction(8, width)
    assert not has_reduction(8, width - 1)
    assert not has_reduction(1024, width - 1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about XLA's CPU compiler")
def test_the_compilers_own_sum_depends_on_the_number_of_rows():
    """Why row_sum exists. If this ever fails, the compiler has changed and row_sum may go."""
    x = numbers(500)
    plain = jax.jit(partial(jnp.sum, axis=-1))
    assert (np.asarray(plain(x[:8])) != np.asarray(plain(x))[:8]).any()
