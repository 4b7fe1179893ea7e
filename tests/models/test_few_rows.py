"""Why no bucket has fewer than MIN_ROWS rows: on XLA's CPU a row would have other bits there.

Of one row the products differ, and of fewer than SAME_ORDER_FROM elements the sums of the norms.
What is excluded is shown, not demanded: where a JAX computes such shapes in the same way, the test
is skipped and says so, and MIN_ROWS may be reconsidered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest

from jaxinfer.config import MIN_ROWS
from jaxinfer.scheduling.buckets import Buckets
from pallas_kernels.matmul import matmul
from pallas_kernels.row_sum import row_sum

WIDTHS = ((576, 1536), (1536, 576), (48, 80))  # in, out: SmolLM2's, and a tiny one
MOST = 64

Rows = Callable[[np.ndarray], jax.Array]
product = jax.jit(matmul)
norm_sum = jax.jit(lambda x: row_sum(x * x, least_rows=MIN_ROWS))


def numbers(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(width).normal(size=(rows, width)).astype(np.float32)


def parts(width: int, out_dim: int) -> dict[str, Rows]:
    """What a layer does to its rows: float32[N, width] -> float32[N, ...]."""
    weight = numbers(out_dim, width)
    return {"product": partial(product_with, weight), "sum of a norm": norm_sum}


def product_with(weight: np.ndarray, x: np.ndarray) -> jax.Array:
    return product(x, weight)


def is_same(part: Rows, x: np.ndarray, rows: int) -> bool:
    """Whether each of the first rows has the bits that it has among MIN_ROWS."""
    shared = min(rows, MIN_ROWS)
    got, want = (np.asarray(part(x[:number]))[:shared] for number in (rows, MIN_ROWS))
    return got.tobytes() == want.tobytes()


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("rows", [9, 16, 24, MOST])
def test_more_rows_have_the_same_bits(width: tuple[int, int], rows: int):
    x = numbers(MOST, width[0])
    for name, part in parts(*width).items():
        assert is_same(part, x, rows), name


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about XLA's CPU compiler")
@pytest.mark.parametrize("rows", range(1, MIN_ROWS))
def test_fewer_rows_have_other_bits(rows: int):
    """Somewhere in a layer of SmolLM2's widths, which is enough to exclude the shape."""
    differing = [
        f"{name} of {width}"
        for width in WIDTHS
        for name, part in parts(*width).items()
        if not is_same(part, numbers(MOST, width[0]), rows)
    ]
    if not differing:
        pytest.skip(f"JAX {jax.__version__} computes {rows} rows as it computes {MIN_ROWS}")


def test_no_bucket_has_fewer_rows():
    for max_num_seqs in (1, 2, 7, 8, 9, 32):
        buckets = Buckets.for_limits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_model_len=64, page_size=16
        )
        assert min(buckets.rows) == MIN_ROWS <= min(buckets.tokens)
