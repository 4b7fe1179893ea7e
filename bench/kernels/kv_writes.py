"""Writing a step's keys and values into the pool."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.case import Case, Check, Operands, kernel_forms
from bench.kernels.costs import kv_write_cost
from bench.kernels.random_arrays import normal, shuffled
from bench.kernels.sizes import Sizes
from pallas_kernels.backend import Backend
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
    most = sizes.checked[-1]
    for is_int8, run in ((False, _write), (True, _write_int8)):
        pools, (k, v, page, slot) = _operands(sizes, most, is_int8, 0)
        write = jax.jit(partial(run, backend=backend))

        def rows(
            number: int,
            write: Any = write,
            pools: Any = pools,
            new: Any = (k, v, page, slot),
        ) -> np.ndarray:
            written = write(*pools, *(x[:number] for x in new))
            page, slot = (np.asarray(index)[:number] for index in new[2:])
            read = [np.asarray(pool)[page, :, slot] for pool in written]
            if len(read) == 4:
                read = [q.astype(np.float32) * scale for q, scale in _with_scales(read)]
            return np.stack(read, axis=1)

        yield Check(
            f"kv_write {'int8' if is_int8 else 'bf16'}",
            rows,
            lambda k=k, v=v: np.stack([np.asarray(x, np.float64) for x in (k, v)], axis=1),
            bound=0.5 / 127 * 1.01 if is_int8 else 0.0,
        )


def _with_scales(read: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    keys, values, key_scales, value_scales = read
    return [(keys, key_scales[..., None]), (values, value_scales[..., None])]


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
