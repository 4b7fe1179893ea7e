"""Kernels that take whole rows: RMSNorm, and a sum over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.case import Case, Check, Operands, kernel_forms
from bench.kernels.costs import rms_norm_cost, row_sum_cost
from bench.kernels.random_arrays import normal
from bench.kernels.sizes import Sizes
from pallas_kernels.backend import Backend
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.row_sum import row_sum

EPS, LEAST_ROWS = 1e-5, 8  # of the reference forms, as the engine has it

norm = partial(rms_norm, eps=EPS, least_rows=LEAST_ROWS)
total = partial(row_sum, least_rows=LEAST_ROWS)


def cases(sizes: Sizes) -> Iterator[Case]:
    for rows in (*sizes.rows, sizes.chunks[-1]):
        yield Case(
            f"rms_norm, {rows} x {sizes.dim}",
            rms_norm_cost(rows, sizes.dim),
            partial(_norm_operands, rows, sizes.dim),
            kernel_forms(norm),
            partial(_torch_norm, rows=rows, dim=sizes.dim),
        )
    for rows in (sizes.rows[0], sizes.rows[-1]):
        yield Case(
            f"row_sum, {rows} x {sizes.vocab_size}",
            row_sum_cost(rows, sizes.vocab_size),
            partial(_sum_operands, rows, sizes.vocab_size),
            kernel_forms(total),
            partial(_torch_sum, rows=rows, width=sizes.vocab_size),
        )


def checks(sizes: Sizes, backend: Backend) -> Iterator[Check]:
    most = sizes.checked[-1]
    x, weight = _norm_operands(most, sizes.dim, 0).read
    normed = jax.jit(partial(norm, backend=backend))
    yield Check(
        "rms_norm",
        lambda rows: np.asarray(normed(x[:rows], weight)),
        lambda: _exact_norm(np.asarray(x, np.float64), np.asarray(weight, np.float64)),
        bound=5e-3,
    )
    (wide,) = _sum_operands(most, sizes.vocab_size, 0).read
    summed = jax.jit(partial(total, backend=backend))
    yield Check(
        "row_sum",
        lambda rows: np.asarray(summed(wide[:rows])),
        lambda: np.asarray(wide, np.float64).sum(axis=1),
        bound=1e-5,
    )


def _norm_operands(rows: int, dim: int, number: int) -> Operands:
    x, weight = normal(number, (rows, dim), jnp.bfloat16), normal(number, (dim,), jnp.bfloat16)
    return Operands((), (x, weight))


def _sum_operands(rows: int, width: int, number: int) -> Operands:
    """Of numbers above 0, as the exponentials are whose sum a softmax needs."""
    return Operands((), (jnp.exp(normal(number, (rows, width), jnp.float32)),))


def _exact_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * weight


def _torch_norm(torch: Any, *, rows: int, dim: int) -> Any:
    x = torch.randn(rows, dim, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(dim, dtype=torch.bfloat16, device="cuda")
    return lambda: torch.nn.functional.rms_norm(x, (dim,), weight, EPS)


def _torch_sum(torch: Any, *, rows: int, width: int) -> Any:
    x = torch.rand(rows, width, dtype=torch.float32, device="cuda")
    return lambda: x.sum(dim=1)
