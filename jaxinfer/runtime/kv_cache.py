"""The KV pool's arrays, and how a step reads and writes them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxinfer.models.config import ModelConfig
from jaxinfer.runtime.aot import Program
from pallas_kernels.backend import Backend
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.query_blocks import QueryBlocks
from pallas_kernels.ragged_attention import ragged_paged_attention

KVPages = list[tuple[jax.Array, jax.Array]]
"""Per layer keys and values, each [P, K, S, D]: pages, KV heads, page slots, head dim."""


def page_shape(config: ModelConfig, *, num_pages: int, page_size: int) -> tuple[int, int, int, int]:
    """[P, K, S, D] of one layer's keys or values."""
    return num_pages, config.num_key_value_heads, page_size, config.head_dim


def page_bytes(config: ModelConfig, *, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes that one page takes in all layers."""
    return config.kv_elements_per_token * page_size * jnp.dtype(dtype).itemsize


def pages_program(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype
) -> Program:
    """What makes one array of the pool: compiled ahead, as all that runs on the device."""
    shape = page_shape(config, num_pages=num_pages, page_size=page_size)
    return Program("kv_pages", jax.jit(partial(jnp.zeros, shape, dtype)).lower)


def make_pages(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    program: Compiled | None = None,
) -> KVPages:
    """The whole pool, zeroed; donated through every step and never copied.

    Args:
        program: of `pages_program`; without it, one is compiled here.
    """
    shape = page_shape(config, num_pages=num_pages, page_size=page_size)
    make = program or partial(jnp.zeros, shape, dtype)
    return [(make(), make()) for _ in range(config.num_hidden_layers)]


class PagedKV:
    """A `KVCache` over one layer's pages for the tokens of one step. Lives while that is traced.

    Args:
        pages: keys and values of the layer; `pages` afterwards has this step's, too.
        page_table: int32[R, M].
        positions: int32[T]; -1 marks padding, which is written nowhere.
        rows: int32[T]: each token's row of page_table; None for a decode step: 0..T-1.
        blocks: a prefill step's query blocks; None for a decode step.
    """

    def __init__(
        self,
        pages: tuple[jax.Array, jax.Array],
        page_table: jax.Array,
        positions: jax.Array,
        rows: jax.Array | None,
        blocks: QueryBlocks[jax.Array] | None,
        *,
        backend: Backend,
    ):
        self.pages = pages
        if rows is None:
            rows = jnp.arange(len(positions), dtype=jnp.int32)
        self._page_table, self._positions, self._rows = page_table, positions, rows
        self._blocks = blocks
        self._backend = backend
        num_pages, _, page_size, _ = pages[0].shape
        at = jnp.maximum(positions, 0)
        own_page = page_table[rows, at // page_size]
        # An index past the pool is dropped by the scatter; -1 would wrap to the last page.
        self._page = jnp.where(positions >= 0, own_page, num_pages)
        self._slot = at % page_size

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> jax.Array:
        with jax.named_scope("kv_write"):
            pages = write_kv(k, v, *self.pages, self._page, self._slot, backend=self._backend)
        self.pages = pages
        factor: float = q.shape[-1] ** -0.5 if scale is None else scale
        if self._blocks is None:
            return paged_attention(
                q,
                *pages,
                self._page_table,
                self._positions,
                scale=factor,
                window=window,
                backend=self._backend,
            )
        return ragged_paged_attention(
            q,
            *pages,
            self._page_table,
            self._positions,
            self._rows,
            self._blocks,
            scale=factor,
            window=window,
            backend=self._backend,
        )
