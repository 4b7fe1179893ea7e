"""Writing a step's keys and values into the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.case import Case, Check, Operands, kernel_forms
from bench.kernels.costs import kv_write_cost
from bench.kernels.random_arrays import normal, shuffled
from bench.kernels.sizes import Sizes
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.kv_write import write_kv, write_quantized_kv


def cases(sizes: Sizes) -> Iterator[Case]:
    for tokens in (*sizes.rows, sizes.chunks[-1]):
        for is_int8, run in ((False, _write), (True, _write_int8)):
            yield Case(
                f"kv_write {'int8' if is_int8 else 'bf16'}, {tokens} rows",
                kv_write_cost(tokens, sizes.kv_heads, sizes.head_dim, is_int8=is_int8),
                partial(_operands, sizes, tokens, is_int8),
                kernel_forms(run),
            )


def checks(sizes: Sizes, backend: Backend) -> Iterator[Check]:
    """The rows are what reading the tokens back gives; int8 ones times their scales."""
    for is_int8, run in ((False, _write), (True, _write_int8)):
        operands = _operands(sizes, sizes.checked[-1], is_int8, 0)
        rows = partial(_read_back, jax.jit(partial(run, backend=backend)), operands)
        yield Check(
            f"kv_write {'int8' if is_int8 else 'bf16'}",
            rows,
            partial(_new_tokens, operands),
            bound=0.5 / 127 * 1.01 if is_int8 else 0.0,
        )
    plain = jax.jit(partial(_write_int8, backend=REFERENCE))
    yield Check(
        "kv_write int8, as in jnp",
        rows,
        lambda: _read_back(plain, operands, sizes.checked[-1]).astype(np.float64),
        bound=0.0,
    )


def _new_tokens(operands: Operands) -> np.ndarray:
    k, v = operands.read[:2]
    return np.stack([np.asarray(x, np.float64) for x in (k, v)], axis=1)


def _read_back(write: Callable[..., Any], operands: Operands, number: int) -> np.ndarray:
    """[number, 2, K, D]: keys and values of the first tokens after writing only these."""
    new = [x[:number] for x in operands.read]
    page, slot = (np.asarray(index) for index in new[2:])
    keys, values, *scales = (
        np.asarray(pool)[page, :, slot] for pool in write(*operands.written, *new)
    )
    if scales:
        keys, values = (
            q.astype(np.float32) * scale[..., None]
            for q, scale in zip((keys, values), scales, strict=True)
        )
    return np.stack([keys, values], axis=1)


def _operands(sizes: Sizes, tokens: int, is_int8: bool, number: int) -> Operands:
    """A pool with four times as many slots as there are tokens, which stand on random pages."""
    num_pages = max(4, -(-4 * tokens // sizes.page_size))
    shape = (num_pages, sizes.kv_heads, sizes.page_size, sizes.head_dim)
    pools = [jnp.zeros(shape, jnp.int8 if is_int8 else jnp.bfloat16) for _ in "kv"]
    if is_int8:
        pools += [jnp.zeros(shape[:3], jnp.float32) for _ in "kv"]
    place = shuffled(number, num_pages * sizes.page_size)[:tokens]
    new = normal(number, (2, tokens, sizes.kv_heads, sizes.head_dim), jnp.bfloat16)
    page, slot = jnp.asarray(place // sizes.page_size), jnp.asarray(place % sizes.page_size)
    return Operands(tuple(pools), (new[0], new[1], page, slot))


def _write(*operands: jax.Array, backend: Backend) -> tuple[jax.Array, ...]:
    k_pages, v_pages, k, v, page, slot = operands
    return write_kv(k, v, k_pages, v_pages, page, slot, backend=backend)


def _write_int8(*operands: jax.Array, backend: Backend) -> tuple[jax.Array, ...]:
    k_pages, v_pages, k_scales, v_scales, k, v, page, slot = operands
    return write_quantized_kv(
        k, v, k_pages, v_pages, k_scales, v_scales, page, slot, backend=backend
    )
