"""What has no elements is refused by name in every kernel; the reference product takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.backend import Backend
from pallas_kernels.expert_matmul_gpu import expert_matmul
from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.kv_write import write_kv
from pallas_kernels.matmul import matmul
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.query_blocks import QueryBlocks
from pallas_kernels.ragged_attention import ragged_paged_attention
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.row_sum import row_sum
from pallas_kernels.w8a8_matmul import w8a8_matmul


def real(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.float32)


def int8(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.int8)


def int32(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.int32)


PAGES = real(2, 1, 16, 16), real(2, 1, 16, 16)
decode, prefill = partial(paged_attention, scale=0.25), partial(ragged_paged_attention, scale=0.25)


def chunk(narrow: int, wide: int) -> tuple[Any, ...]:
    blocks = QueryBlocks(int32(narrow), int32(), int32(wide, 16), int32())
    return real(16, 1, 16), *PAGES, int32(8, 2), int32(16), int32(16), blocks


CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("x", matmul, (real(0, 32), real(8, 32))),
    ("weight", matmul, (real(8, 32), real(0, 32))),
    ("x", matmul, (real(8, 0), real(8, 0))),
    ("x", int8_matmul, (real(0, 32), int8(8, 32), real(1, 8))),
    ("x", int4_matmul, (real(0, 32), int8(8, 16), real(1, 8))),
    ("xq", w8a8_matmul, (int8(0, 32), real(0), int8(8, 32), real(8))),
    ("x", partial(expert_matmul, num_experts=2), (real(0, 32), real(8, 32), int32(2), int32())),
    ("q", decode, (real(0, 1, 16), *PAGES, int32(0, 2), int32(0))),
    ("page_table", decode, (real(8, 1, 16), *PAGES, int32(8, 0), int32(8))),
    ("narrow", prefill, chunk(0, 4)),
    ("wide", prefill, chunk(8, 0)),
    ("x", partial(rms_norm, eps=1e-5), (real(0, 8), real(8))),
    ("x", partial(rms_norm, eps=1e-5), (real(8, 0), real(0))),
    ("x", row_sum, (real(0, 8),)),
    ("x", row_sum, (real(8, 0),)),
    ("k", write_kv, (real(0, 1, 16), real(0, 1, 16), *PAGES, int32(0), int32(0))),
]


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(("name", "operation", "args"), CASES)
def test_an_empty_axis_is_refused_by_name(
    name: str, operation: Callable[..., Any], args: tuple[Any, ...], is_exact: bool
):
    if operation is matmul and not is_exact:
        pytest.skip("is XLA's own product, which takes it")
    backend = Backend("interpret", is_exact=is_exact)
    with pytest.raises(ValueError, match=f"^{name} must have no empty axis for a kernel; got"):
        operation(*args, backend=backend)


@pytest.mark.parametrize("args", [case[2] for case in CASES if case[1] is matmul])
def test_the_reference_product_takes_it(args: tuple[Any, ...]):
    assert matmul(*args).shape == (args[0].shape[0], args[1].shape[0])
