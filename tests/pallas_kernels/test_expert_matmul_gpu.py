"""Products of a mixture of experts against those of each expert's weight alone, and rows that do
not depend on their block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import qtensor
from pallas_kernels import split_product
from pallas_kernels.backend import Backend, Gpu
from pallas_kernels.expert_matmul_gpu import (
    expert_int4_matmul,
    expert_int8_matmul,
    expert_matmul,
    expert_w8a8_matmul,
)
from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.w8a8_matmul import quantize_rows, w8a8_matmul
from tests.pallas_kernels.product_rows import relative_error

NUM_EXPERTS = 3
BF16, F32 = jnp.bfloat16, jnp.float32
STATIC = ("num_experts", "out_dtype", "backend")
DENSE, INT8, INT4, W8A8 = (
    (jax.jit(of_blocks, static_argnames=STATIC), jax.jit(of_one, static_argnames=STATIC[1:]))
    for of_blocks, of_one in (
        (expert_matmul, matmul),
        (expert_int8_matmul, int8_matmul),
        (expert_int4_matmul, int4_matmul),
        (expert_w8a8_matmul, w8a8_matmul),
    )
)
AXES = {"weight": 0, "q": 0, "scale": -1, "zero": -1}  # that a part has its outputs on


@dataclass(frozen=True)
class Product:
    """A mixture's product and the same of one weight, both jitted."""

    of_blocks: Callable[..., jax.Array]
    of_one: Callable[..., jax.Array]
    parts: Mapping[str, Any]  # of all experts
    num_outputs: int  # of one
    backend: Backend

    def blocks(self, rows: Sequence[Any], experts: Any, num_blocks: int, **options: Any) -> Any:
        numbers = np.asarray(experts, np.int32), np.int32(num_blocks)
        options |= {"num_experts": NUM_EXPERTS, "backend": self.backend}
        return np.asarray(self.of_blocks(*rows, *self.parts.values(), *numbers, **options))

    def one(self, rows: Sequence[Any], expert: int) -> np.ndarray:
        chosen = np.arange(expert * self.num_outputs, (expert + 1) * self.num_outputs)
        own = [
            None if part is None else np.take(part, chosen, AXES[name])
            for name, part in self.parts.items()
        ]
        return np.asarray(self.of_one(*rows, *own, backend=self.backend))


def product(kind: str, gpu: Gpu, n: int, k: int) -> Product:
    """kind: a dtype, w8a8, or bits with the group size of scales, and perhaps zero points."""
    rng = np.random.default_rng(n + k)
    backend, outputs = Backend("interpret", gpu), NUM_EXPERTS * n
    if kind in ("bfloat16", "float32"):
        weight = rng.normal(size=(outputs, k)).astype(F32 if kind == "float32" else BF16)
        return Product(*DENSE, {"weight": weight}, n, backend)
    if kind == "w8a8":
        parts = {
            "q": rng.integers(-127, 128, (outputs, k), np.int8),
            "scale": rng.uniform(0.001, 0.1, outputs).astype(F32),
        }
        return Product(*W8A8, parts, n, backend)
    width, size, *more = kind.split()
    bits, group, has_zero = int(width[3:]), int(size[1:]), bool(more)
    low = -8 if bits == 4 else -128
    values = rng.integers(low, -low, (outputs, k), np.int8)
    scale = rng.uniform(0.001, 0.1, (-(-k // group), outputs)).astype(F32)
    zero = rng.integers(low, -low, scale.shape, np.int8) if has_zero else None
    if bits == 8:
        parts = {"q": values, "scale": scale, "zero": zero}
        return Product(*INT8, parts, n, backend)
    above = np.int8(8 if has_zero else 0)
    packed = qtensor.pack_int4(values + above, group if group < k else None)
    zero = None if zero is None else zero + above
    parts = {"q": packed, "scale": scale, "zero": zero}
    return Product(*INT4, parts, n, backend)


def rows_of(kind: str, num_rows: int, k: int) -> list[Any]:
    x = np.random.default_rng(k).normal(size=(num_rows, k))
    if kind == "w8a8":
        return [np.asarray(part) for part in quantize_rows(jnp.asarray(x, F32))]
    return [x.astype(F32 if kind == "float32" else BF16)]


@pytest.mark.parametrize(
    ("kind", "gpu", "n", "k", "rows"),
    [
        ("bfloat16", "sm_90", 140, 340, 8),
        ("bfloat16", "sm_80", 33, 85, 20),
        ("float32", "sm_80", 33, 85, 20),
        ("int8 g128", "sm_90", 64, 300, 16),
        ("int8 g85 zero", "sm_80", 70, 85, 8),
        ("int4 g128", "sm_80", 70, 300, 8),
        ("int4 g64 zero", "sm_90", 64, 181, 70),
        ("int4 g85", "sm_90", 70, 85, 8),
        ("w8a8", "sm_90", 70, 300, 8),
    ],
)
def test_a_block_has_the_bits_of_the_product_with_its_experts_weight(
    kind: str, gpu: Gpu, n: int, k: int, rows: int
):
    """Blocks of one expert, of none, and an expert without a block."""
    experts, num_used = [2, 0, 2, 2, 1], 4
    x, mixture = rows_of(kind, len(experts) * rows, k), product(kind, gpu, n, k)
    got = mixture.blocks(x, experts, num_used)
    assert (got.dtype, got.shape) == (F32, (len(experts) * rows, n))
    for block, expert in enumerate(experts[:num_used]):
        own = slice(block * rows, (block + 1) * rows)
        np.testing.assert_array_equal(got[own], mixture.one([part[own] for part in x], expert))
    assert not got[num_used * rows :].any()


@pytest.mark.parametrize("kind", ["bfloat16", "int4 g64 zero"])
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
def test_a_row_has_its_bits_whatever_its_block(kind: str, gpu: Gpu):
    """All rows to one expert, in blocks of other sizes, among others, and beside extreme rows."""
    k = 600
    (x,), mixture = rows_of(kind, 64, k), product(kind, gpu, 70, k)
    want = mixture.blocks([x], [1], 1)
    np.testing.assert_array_equal(mixture.blocks([x], [1] * 8, 8), want)
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(mixture.blocks([x[order]], [1] * 4, 4), want[order])
    beside = np.repeat(x, 2, 0)
    beside[1::2] = np.resize(np.asarray([np.nan, 3e38, -np.inf, 0], x.dtype), (64, 1))
    got = mixture.blocks([np.concatenate([beside[:64], beside])], [0, 2, 1, 1, 1, 1], 6)
    np.testing.assert_array_equal(got[64::2], want)


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
def test_k_is_added_up_as_in_a_product_that_is_not_split(gpu: Gpu, monkeypatch: Any):
    monkeypatch.setattr(split_product, "MOST_SPLITS", 1)
    x, mixture = rows_of("int8 g128", 16, 1300), product("int8 g128", gpu, 70, 1300)
    got = mixture.blocks(x, [1], 1)
    np.testing.assert_array_equal(got, mixture.one(x, 1))
    q, scale = mixture.parts["q"][70:140], mixture.parts["scale"][:, 70:140]
    weight = q * np.repeat(scale.T.astype(np.float64), 128, 1)[:, :1300]
    assert relative_error(got, x[0].astype(np.float64) @ weight.T) < 5e-3


@pytest.mark.parametrize("num_used", [0, 1])
def test_a_block_that_is_not_used_is_neither_read_nor_left_as_it_was(num_used: int):
    mixture = product("bfloat16", "sm_90", 33, 64)
    (x,) = rows_of("bfloat16", 24, 64)
    x[8 * num_used :] = np.nan
    got = mixture.blocks([x], [0, 10**6, -5], num_used)
    assert np.abs(got[: 8 * num_used]).all()
    np.testing.assert_array_equal(got[8 * num_used :], 0)


def test_the_result_is_rounded_once_to_the_type_that_is_asked_for():
    mixture, x = product("int8 g128", "sm_80", 33, 256), rows_of("int8 g128", 16, 256)
    wide, out = (mixture.blocks(x, [2, 0], 2, out_dtype=dtype) for dtype in (F32, BF16))
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, wide.astype(BF16))


def test_a_backend_that_is_not_exact_is_right_too():
    mixture, x = product("int8 g128", "sm_90", 64, 1536), rows_of("int8 g128", 16, 1536)
    want = mixture.blocks(x, [2, 0], 2)
    loose = replace(mixture, backend=Backend("interpret", is_exact=False))
    assert relative_error(loose.blocks(x, [2, 0], 2), want.astype(np.float64)) < 5e-3


def shaped(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": shaped(jnp.int32, 3)}, r"x must .* rows for each block; got 16 for .*\(3,\)"),
        ({"experts": shaped(jnp.int32, 0)}, r"x must .* got 16 for experts \(0,\)"),
        ({"experts": shaped(jnp.int8, 2)}, r"experts must be int32\[B\]; got int8 \(2,\)"),
        ({"num_blocks": shaped(jnp.int32, 1)}, r"num_blocks must be int32\[\]; got int32 \(1,\)"),
        ({"num_experts": 5}, "num_experts must divide .* the weight, 192; got 5"),
        ({"num_experts": 0}, "num_experts must divide .*; got 0"),
        ({"scale": shaped(jnp.float32, 2, 64)}, r"scale must be float32 \[G, 192\]"),
        (
            {"q": shaped(jnp.int8, 3 * 2**22, 256), "scale": shaped(jnp.float32, 1, 3 * 2**22)},
            r"q must have fewer than 2\*\*31 or more than 2\*\*32 bytes",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str):
    arguments = {
        "x": shaped(BF16, 16, 256),
        "q": shaped(jnp.int8, 192, 256),
        "scale": shaped(F32, 2, 192),
        "experts": shaped(jnp.int32, 2),
        "num_blocks": shaped(jnp.int32),
        "num_experts": NUM_EXPERTS,
    } | changes
    static = {"num_experts": arguments.pop("num_experts"), "backend": Backend("pallas")}
    run = partial(expert_int8_matmul, zero=None, **static)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, **arguments)
