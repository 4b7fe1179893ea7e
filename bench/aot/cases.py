"""Every kernel in the configurations that are shipped, as functions with the shapes they take.

Sizes are those of a 7B model, and of mixtures of experts as they are published. Where a tile, a
dtype or a feature changes the kernel, there is a case; kernels that must agree bit for bit have one
`sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.expert_matmul_gpu import (
    expert_int4_matmul,
    expert_int8_matmul,
    expert_matmul,
    expert_w8a8_matmul,
)
from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.kv_write import write_kv, write_quantized_kv
from pallas_kernels.matmul import matmul
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.query_blocks import QueryBlocks
from pallas_kernels.ragged_attention import ragged_paged_attention
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.row_sum import row_sum
from pallas_kernels.w8a8_matmul import w8a8_matmul

DIM, HIDDEN, VOCAB = 4096, 14336, 128256
SQUARE = DIM, DIM
SHORT = 4160  # elements of K: half a group of 128 more than whole ones
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
NUM_PAGES, PAGE_SIZE, MAX_PAGES = 2048, 64, 128
TOKENS = 512  # of a prefill step
BF16, F32, INT8, INT32 = (jnp.dtype(name) for name in ("bfloat16", "float32", "int8", "int32"))
ROWS = (8, 32, 64, 256)  # of a product: each takes another tile on one of the GPUs
MIXTURES = {  # experts, and the two sizes of their products
    "Mixtral 8x7B": (8, 4096, 14336),
    "Qwen3-30B-A3B": (128, 2048, 768),
    "OLMoE": (64, 2048, 1024),
}
NUM_BLOCKS = 64  # of rows that meet one expert

Shape = jax.ShapeDtypeStruct
Operation = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size."""

    name: str
    operation: Operation  # takes args, and backend=
    args: tuple[Any, ...]  # of ShapeDtypeStructs and None
    donate: tuple[int, ...] = ()  # places of args that the result may take
    sums: str = ""  # cases of one name must add up in one order; empty: there is no such sum
    has_products: bool = True  # uses tensor cores
    narrow: tuple[int, ...] = ()  # bytes of streamed loads that are not 16 wide, and may be
    has_byte_loads: bool = False

    def function(self, backend: Backend) -> Callable[..., Any]:
        return partial(self.operation, backend=backend)


def cases() -> list[Case]:
    """All of them; names are unique."""
    return [*products(), *expert_products(), *decode_attention(), *ragged_attention(), *rows()]


def products() -> Iterator[Case]:
    """x @ weight.T in each format of weights."""
    for m in ROWS:
        yield _product("dense", matmul, m, _dense(*SQUARE))
        yield _product("int8 g128", int8_matmul, m, _int8(*SQUARE, 128))
        yield _product("int4 g128", int4_matmul, m, _int4(*SQUARE, 128))
        yield _w8a8(m, *SQUARE)
    yield _product("dense 14336x4096", matmul, 64, _dense(HIDDEN, DIM))
    yield _product("dense 128256x4096", matmul, 64, _dense(VOCAB, DIM))
    yield _product("int8 per channel", int8_matmul, 64, _int8(*SQUARE, DIM))
    yield _product("int8 g64", int8_matmul, 64, _int8(*SQUARE, 64))
    packed = _asymmetric("int4 g64", int4_matmul, 64, _int4(*SQUARE, 64))
    # Half a group of 64 is 32 bytes, which are fewer than a tile's threads take by 16.
    yield replace(packed, narrow=(8,))
    small = _product("int8 g32", int8_matmul, 64, _int8(*SQUARE, 32))
    yield replace(small, narrow=(4, 8))
    yield _product("int4 per channel", int4_matmul, 64, _int4(*SQUARE, DIM))
    yield _product("dense f32", matmul, 64, (Shape(SQUARE, F32),), dtype=F32)
    yield from _with_zero_points()
    yield from _with_short_groups()


def _with_zero_points() -> Iterator[Case]:
    """Few and many rows."""
    for m in ROWS[::3]:
        yield _asymmetric("int8 g128", int8_matmul, m, _int8(*SQUARE, 128))
        yield _asymmetric("int4 g128", int4_matmul, m, _int4(*SQUARE, 128))
    yield _asymmetric("int8 per channel", int8_matmul, 64, _int8(*SQUARE, DIM))


def _with_short_groups() -> Iterator[Case]:
    """Of a K that the last group is shorter in, and is not whole tiles."""
    for m in ROWS[::3]:
        yield _product("int8 g128, K=4160", int8_matmul, m, _int8(DIM, SHORT, 128), k=SHORT)
        yield _product("int4 g128, K=4160", int4_matmul, m, _int4(DIM, SHORT, 128), k=SHORT)
    yield _product("int4 per channel, K=4160", int4_matmul, 64, _int4(DIM, SHORT, SHORT), k=SHORT)


def expert_products() -> Iterator[Case]:
    """In: blocks of few rows; out: of many. What adds up in one order is a format."""
    for name, (experts, dim, hidden) in MIXTURES.items():
        for which, rows, n, k in (("in", 8, hidden, dim), ("out", 64, dim, hidden)):
            outputs, x = experts * n, Shape((NUM_BLOCKS * rows, k), BF16)
            dense, int8, int4 = _dense(outputs, k), _int8(outputs, k, 128), _int4(outputs, k, 128)
            case = partial(_of_experts, f"{name} {which}", experts)
            yield case("bf16", expert_matmul, (x, *dense))
            yield case("int8 g128", expert_int8_matmul, (x, *int8, None))
            yield case("int4 g128", expert_int4_matmul, (x, *int4, None))
    experts, k, n = MIXTURES["OLMoE"]
    x, packed = Shape((NUM_BLOCKS * 8, k), BF16), _int4(experts * n, k, 128)
    zero = Shape(packed[1].shape, INT8)
    case = partial(_of_experts, "OLMoE in", experts)
    asymmetric = case("int4 g128, zero points", expert_int4_matmul, (x, *packed, zero))
    yield replace(asymmetric, has_byte_loads=True)
    xq, x_scale = Shape(x.shape, INT8), Shape(x.shape[:1], F32)
    weight = Shape((experts * n, k), INT8), Shape((experts * n,), F32)
    yield replace(case("w8a8", expert_w8a8_matmul, (xq, x_scale, *weight)), sums="")


def decode_attention() -> Iterator[Case]:
    """One query per row. Where rows are few, a row's KV is shared out."""
    for n in (8, 64, 128):
        yield _decode(f"decode N={n}", n)
    yield _decode("decode int8 KV", 64, kv=INT8)


def ragged_attention() -> Iterator[Case]:
    """Chunks of 512 tokens; its queries that attend alone go through the decode kernel."""
    yield _ragged("ragged")
    yield _ragged("ragged int8 KV", kv=INT8)
    yield _ragged("ragged D=64", dim=64)
    yield _ragged("ragged D=80, 20 heads per KV head", dim=80, heads=20, kv_heads=1)
    yield _ragged("ragged D=96, window, soft cap", dim=96, window=4096, soft_cap=30.0)
    yield _ragged(
        "ragged D=96 int8 KV, window, soft cap", dim=96, kv=INT8, window=4096, soft_cap=30.0
    )
    yield _ragged("ragged D=256", dim=256)
    yield _ragged("ragged D=256 int8 KV", dim=256, kv=INT8)
    yield _ragged("ragged f32", dtype=F32, kv=F32)
    yield _ragged("ragged f32 D=64", dtype=F32, kv=F32, dim=64)
    yield _ragged("ragged f32, int8 KV", dtype=F32, kv=INT8)


def rows() -> Iterator[Case]:
    """What takes whole rows or tokens, without tensor cores."""
    x, weight = Shape((64, DIM), BF16), Shape((DIM,), BF16)
    norm = partial(rms_norm, eps=1e-5)
    yield Case("rms_norm", norm, (x, weight), has_products=False)
    yield Case("row_sum of a vocabulary", row_sum, (Shape((64, VOCAB), F32),), has_products=False)
    new = Shape((64, KV_HEADS, HEAD_DIM), BF16)
    at = Shape((64,), INT32)
    pages, _ = _pages(KV_HEADS, HEAD_DIM, BF16)
    yield Case(
        "write_kv", write_kv, (new, new, pages, pages, at, at), donate=(2, 3), has_products=False
    )
    pages, scales = _pages(KV_HEADS, HEAD_DIM, INT8)
    yield Case(
        "write_quantized_kv",
        write_quantized_kv,
        (new, new, pages, pages, scales, scales, at, at),
        donate=(2, 3, 4, 5),
        has_products=False,
    )


def _product(
    name: str,
    operation: Operation,
    m: int,
    weight: tuple[Any, ...],
    *,
    dtype: jnp.dtype = BF16,
    k: int = DIM,
) -> Case:
    """Cases of one name are the same product of more or fewer rows."""
    args = Shape((m, k), dtype), *weight
    return Case(
        f"{name} M={m}",
        partial(operation, out_dtype=dtype),
        args,
        sums=name,
        has_products=dtype != F32,
    )


def _dense(n: int, k: int) -> tuple[Any, ...]:
    return (Shape((n, k), BF16),)


def _int8(n: int, k: int, group: int) -> tuple[Any, ...]:
    return Shape((n, k), INT8), Shape((-(-k // group), n), F32)


def _int4(n: int, k: int, group: int) -> tuple[Any, ...]:
    groups = -(-k // group)
    return Shape((n, groups * group // 2), INT8), Shape((groups, n), F32)


def _asymmetric(name: str, operation: Operation, m: int, weight: tuple[Any, ...]) -> Case:
    """The same with zero points, which are loaded by the byte."""
    zero = Shape(weight[1].shape, INT8)
    case = _product(f"{name}, zero points", operation, m, (*weight, zero))
    return replace(case, has_byte_loads=True)


def _w8a8(m: int, n: int, k: int) -> Case:
    args = Shape((m, k), INT8), Shape((m,), F32), Shape((n, k), INT8), Shape((n,), F32)
    # Sums of integers are exact in any order: tiles and instructions may follow the rows.
    return Case(f"w8a8 M={m}", partial(w8a8_matmul, out_dtype=BF16), args)


def _of_experts(
    name: str, num_experts: int, kept: str, operation: Operation, args: tuple[Any, ...]
) -> Case:
    blocks = Shape((NUM_BLOCKS,), INT32), Shape((), INT32)
    of_experts = partial(operation, num_experts=num_experts, out_dtype=BF16)
    return Case(f"{name}, {kept}", of_experts, (*args, *blocks), sums=f"experts, {kept}")


def _decode(name: str, n: int, *, kv: jnp.dtype = BF16) -> Case:
    pages, scales = _pages(KV_HEADS, HEAD_DIM, kv)
    q, table, axis = (
        Shape((n, HEADS, HEAD_DIM), BF16),
        Shape((n, MAX_PAGES), INT32),
        Shape((n,), INT32),
    )
    args = q, pages, pages, table, axis, scales, scales
    operation = _scaled(paged_attention, HEAD_DIM)
    sums = f"attention D={HEAD_DIM} {kv}"
    return Case(name, operation, args, sums=sums, narrow=_narrow(kv))


def _ragged(
    name: str,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = HEAD_DIM,
    dtype: jnp.dtype = BF16,
    kv: jnp.dtype = BF16,
    **scoring: Any,
) -> Case:
    """Its sums are those of the decode kernel, also inside itself."""
    pages, scales = _pages(kv_heads, dim, kv)
    table, axis, count = Shape((64, MAX_PAGES), INT32), Shape((TOKENS,), INT32), Shape((), INT32)
    blocks = QueryBlocks(Shape((64,), INT32), count, Shape((72, 64), INT32), count)
    q = Shape((TOKENS, heads, dim), dtype)
    args = q, pages, pages, table, axis, axis, blocks, scales, scales
    operation = _scaled(ragged_paged_attention, dim, **scoring)
    sums = f"attention D={dim} {kv}"
    return Case(name, operation, args, sums=sums, has_products=dtype != F32, narrow=_narrow(kv))


def _narrow(kv: jnp.dtype) -> tuple[int, ...]:
    """Page ids and scales are single words; values of int8 are laid out for their product by 8."""
    return (4, 8) if kv == INT8 else (4,)


def _scaled(attention: Operation, dim: int, **scoring: Any) -> Operation:
    """Takes the scales of the pages as its last two arguments."""

    def operation(*args: Any, backend: Backend) -> jax.Array:
        *arrays, k_scales, v_scales = args
        return attention(
            *arrays,
            scale=dim**-0.5,
            k_scales=k_scales,
            v_scales=v_scales,
            backend=backend,
            **scoring,
        )

    return operation


def _pages(kv_heads: int, dim: int, dtype: jnp.dtype) -> tuple[Shape, Shape | None]:
    """Of keys or values, and their scales."""
    pool = NUM_PAGES, kv_heads, PAGE_SIZE
    return Shape((*pool, dim), dtype), Shape(pool, F32) if dtype == INT8 else None
