"""Why no bucket has fewer than MIN_ROWS rows: XLA's CPU products of fewer have other bits.

What is excluded is shown, not demanded: where a JAX computes such shapes in the same way, the test
is skipped and says so, and MIN_ROWS may be reconsidered.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer.config import MIN_ROWS
from jaxinfer.models.layers import matmul_transposed
from jaxinfer.scheduling.buckets import Buckets

WIDTHS = ((576, 576), (576, 1536), (1536, 576), (48, 80))  # in, out: SmolLM2's, and a tiny one
MOST = 64

product = jax.jit(matmul_transposed)


@pytest.fixture(scope="module", params=WIDTHS, ids=str)
def operands(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """float32[MOST, in] and a weight float32[out, in]."""
    in_dim, out_dim = request.param
    rng = np.random.default_rng(in_dim)
    x, weight = rng.normal(size=(MOST, in_dim)), rng.normal(size=(out_dim, in_dim))
    return x.astype(np.float32), weight.astype(np.float32)


def is_same(operands: tuple[np.ndarray, np.ndarray], rows: int) -> bool:
    """Whether each of so many rows has the bits that it has among MIN_ROWS."""
    x, weight = operands
    got = np.asarray(product(x[:rows], weight))
    shared = min(rows, MIN_ROWS)
    return got[:shared].tobytes() == np.asarray(product(x[:MIN_ROWS], weight))[:shared].tobytes()


@pytest.mark.parametrize("rows", [9, 12, 16, 24, 32, 48, MOST])
def test_a_product_of_more_rows_has_the_same_bits(
    operands: tuple[np.ndarray, np.ndarray], rows: int
):
    assert is_same(operands, rows)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about XLA's CPU compiler")
@pytest.mark.parametrize("rows", range(1, MIN_ROWS))
def test_a_product_of_fewer_rows_has_other_bits(rows: int):
    """At some width; a shape that breaks at one of them is of no use."""
    rng = np.random.default_rng(rows)
    for in_dim, out_dim in WIDTHS:
        x, weight = rng.normal(size=(MIN_ROWS, in_dim)), rng.normal(size=(out_dim, in_dim))
        if not is_same((x.astype(np.float32), weight.astype(np.float32)), rows):
            return
    pytest.skip(f"JAX {jax.__version__} computes {rows} rows as it computes {MIN_ROWS}")


def test_no_bucket_has_fewer_rows():
    for max_num_seqs in (1, 2, 7, 8, 9, 32):
        buckets = Buckets.for_limits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_model_len=64, page_size=16
        )
        assert min(buckets.rows) == MIN_ROWS <= min(buckets.tokens)
