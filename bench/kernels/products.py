"""Products with a weight: bf16, int8 and int4 with scales, int8 x int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.case import Arrays, Case, Check, Operands, kernel_forms
from bench.kernels.costs import Cost, matmul_cost, w8a8_cost
from bench.kernels.random_arrays import normal, positive, small_ints
from bench.kernels.sizes import Sizes
from pallas_kernels.backend import Backend
from pallas_kernels.int4_matmul import int4_matmul, unpack_int4
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.w8a8_matmul import quantize_rows, w8a8_matmul

Shape = tuple[int, int]  # [out, in] of a weight
TorchLaunch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Product:
    """A kernel: (*x, *weight) -> [rows, out]."""

    name: str
    run: Callable[..., jax.Array]
    weight: Callable[[int, Shape], Arrays]  # of the copy with this number
    wide: Callable[[Arrays], np.ndarray]  # float64[out, in]
    cost: Callable[[int, int, int], Cost]  # (rows, in, out)
    is_int8: bool = False  # x, too
    torch: Callable[[Any, int, Shape], TorchLaunch] | None = None


def products(group: int) -> tuple[Product, ...]:
    """Every kind; `group` elements of a row share a scale where it has groups."""
    return (
        Product("bf16", matmul, _bf16, _wide_bf16, matmul_cost, torch=_torch_bf16),
        Product(
            "int8", int8_matmul, partial(_int8, None), _wide_int8, _int8_cost, torch=_torch_int8
        ),
        Product(
            f"int8 g{group}",
            int8_matmul,
            partial(_int8, group),
            _wide_int8,
            partial(matmul_cost, weight_bits=8, group=group),
        ),
        Product(
            f"int4 g{group}",
            int4_matmul,
            partial(_int4, group),
            partial(_wide_int4, group),
            partial(matmul_cost, weight_bits=4, group=group),
        ),
        Product("w8a8", w8a8_matmul, _w8a8, _wide_w8a8, w8a8_cost, is_int8=True),
    )


def cases(sizes: Sizes) -> Iterator[Case]:
    """The MLP's two products, which are most of a model's weights."""
    for kind in products(sizes.group):
        for shape in ((sizes.hidden_dim, sizes.dim), (sizes.dim, sizes.hidden_dim)):
            for rows in (*sizes.rows, *sizes.chunks):
                out_dim, in_dim = shape
                yield Case(
                    f"matmul {kind.name}, {rows} x {in_dim}->{out_dim}",
                    kind.cost(rows, in_dim, out_dim),
                    partial(_operands, kind, rows, shape),
                    kernel_forms(partial(kind.run, out_dtype=jnp.bfloat16), has_fast=True),
                    None if kind.torch is None else partial(_torch_launch, kind, rows, shape),
                )


def checks(sizes: Sizes, backend: Backend) -> Iterator[Check]:
    shape = (sizes.dim, sizes.hidden_dim)
    for kind in products(sizes.group):
        operands = _operands(kind, sizes.checked[-1], shape, 0).read
        num_x = 2 if kind.is_int8 else 1
        x, weight = operands[:num_x], operands[num_x:]
        run = jax.jit(partial(kind.run, out_dtype=jnp.bfloat16, backend=backend))

        def rows(number: int, run: Any = run, x: Any = x, weight: Any = weight) -> np.ndarray:
            return np.asarray(run(*(part[:number] for part in x), *weight))

        def expected(kind: Product = kind, x: Any = x, weight: Any = weight) -> np.ndarray:
            wide = np.asarray(x[0], np.float64)
            if kind.is_int8:
                wide = wide * np.asarray(x[1], np.float64)[:, None]
            return wide @ kind.wide(weight).T

        yield Check(f"matmul {kind.name}", rows, expected, bound=5e-3)


def _operands(kind: Product, rows: int, shape: Shape, number: int) -> Operands:
    x = normal(number, (rows, shape[1]), jnp.bfloat16)
    own = jax.jit(quantize_rows)(x) if kind.is_int8 else (x,)
    return Operands((), (*own, *kind.weight(number, shape)))


def _bf16(number: int, shape: Shape) -> Arrays:
    return (normal(number, shape, jnp.bfloat16, shape[1] ** -0.5),)


def _int8(group: int | None, number: int, shape: Shape) -> Arrays:
    out_dim, in_dim = shape
    num_groups = in_dim // (group or in_dim)
    scale = positive(number, (num_groups, out_dim), in_dim**-0.5 / 64)
    return small_ints(number, shape, -127, 127), scale


def _int4(group: int, number: int, shape: Shape) -> Arrays:
    out_dim, in_dim = shape
    packed = small_ints(number, (out_dim, in_dim // 2), -128, 127)
    return packed, positive(number, (in_dim // group, out_dim), in_dim**-0.5 / 4)


def _w8a8(number: int, shape: Shape) -> Arrays:
    q, scale = _int8(None, number, shape)
    return q, scale[0]


def _wide_bf16(weight: Arrays) -> np.ndarray:
    return np.asarray(weight[0], np.float64)


def _wide_int8(weight: Arrays) -> np.ndarray:
    q, scale = (np.asarray(part, np.float64) for part in weight)
    return q * np.repeat(scale, q.shape[1] // scale.shape[0], axis=0).T


def _wide_int4(group: int, weight: Arrays) -> np.ndarray:
    return _wide_int8((unpack_int4(weight[0], group), weight[1]))


def _wide_w8a8(weight: Arrays) -> np.ndarray:
    return np.asarray(weight[0], np.float64) * np.asarray(weight[1], np.float64)[:, None]


def _int8_cost(rows: int, in_dim: int, out_dim: int) -> Cost:
    return matmul_cost(rows, in_dim, out_dim, weight_bits=8, group=in_dim)


def _torch_launch(kind: Product, rows: int, shape: Shape, torch: Any) -> TorchLaunch:
    assert kind.torch is not None
    return kind.torch(torch, rows, shape)


def _torch_bf16(torch: Any, rows: int, shape: Shape) -> TorchLaunch:
    x = torch.randn(rows, shape[1], dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
    return lambda: torch.nn.functional.linear(x, weight)


def _torch_int8(torch: Any, rows: int, shape: Shape) -> TorchLaunch:
    x = torch.randn(rows, shape[1], dtype=torch.bfloat16, device="cuda")
    q = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
    scale = torch.rand(shape[0], dtype=torch.bfloat16, device="cuda")
    return lambda: torch._weight_int8pack_mm(x, q, scale)
