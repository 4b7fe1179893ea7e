"""The KV pool's arrays, and how a step reads and writes them.

A pool of int8 has a scale for each token's keys and values in each head: half of bfloat16's bytes
and a little more (4 bytes for each D).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxinfer.config import KVCacheDtype
from jaxinfer.models.config import ModelConfig
from jaxinfer.runtime.aot import Program
from pallas_kernels.backend import Backend
from pallas_kernels.kv_write import write_kv, write_quantized_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.query_blocks import QueryBlocks
from pallas_kernels.ragged_attention import ragged_paged_attention

Array = TypeVar("Array", jax.Array, jax.ShapeDtypeStruct)


class LayerPages(NamedTuple, Generic[Array]):
    """One layer's part of the pool: P pages of S slots, K KV heads, head dim D."""

    keys: Array  # float or int8 [P, K, S, D]
    values: Array
    key_scales: Array | None = None  # float32[P, K, S] of int8: a token's head is scale * int8
    value_scales: Array | None = None


KVPages = list[LayerPages[jax.Array]]
"""By layer."""


def pages_dtype(name: KVCacheDtype, dtype: jnp.dtype) -> jnp.dtype:
    """`auto` is the model's own `dtype`."""
    return dtype if name == "auto" else jnp.dtype(name)


def page_shape(config: ModelConfig, *, num_pages: int, page_size: int) -> tuple[int, int, int, int]:
    """[P, K, S, D] of one layer's keys or values."""
    return num_pages, config.num_key_value_heads, page_size, config.head_dim


def page_bytes(config: ModelConfig, *, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes that one page takes in all layers, scales included."""
    layer = layer_shapes(config, num_pages=1, page_size=page_size, dtype=dtype)
    one = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer))
    return config.num_hidden_layers * one


def layer_shapes(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype
) -> LayerPages[jax.ShapeDtypeStruct]:
    """Of one layer's arrays; int8 is with scales."""
    shape = page_shape(config, num_pages=num_pages, page_size=page_size)
    page = jax.ShapeDtypeStruct(shape, dtype)
    if dtype != jnp.int8:
        return LayerPages(page, page)
    scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32)
    return LayerPages(page, page, scales, scales)


def pages_program(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype
) -> Program:
    """What makes one layer's pages: compiled ahead, as all that runs on the device."""
    shapes = layer_shapes(config, num_pages=num_pages, page_size=page_size, dtype=dtype)
    return Program("kv_pages", jax.jit(partial(_zeros, shapes)).lower)


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
    shapes = layer_shapes(config, num_pages=num_pages, page_size=page_size, dtype=dtype)
    make = program or partial(_zeros, shapes)
    return [make() for _ in range(config.num_hidden_layers)]


def _zeros(shapes: LayerPages[jax.ShapeDtypeStruct]) -> LayerPages[jax.Array]:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


class PagedKV:
    """A `KVCache` over one layer's pages for the tokens of one step. Lives while that is traced.

    Args:
        pages: of the layer; `pages` afterwards has this step's keys and values, too.
        page_table: int32[R, M].
        positions: int32[T]; -1 marks padding, which is written nowhere.
        rows: int32[T]: each token's row of page_table; None for a decode step: 0..T-1.
        blocks: a prefill step's query blocks; None for a decode step.
    """

    def __init__(
        self,
        pages: LayerPages[jax.Array],
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
        num_pages, _, page_size, _ = pages.keys.shape
        at = jnp.maximum(positions, 0)
        own_page = page_table[rows, at // page_size]
        # An index past the pool is dropped by the scatter; -1 would wrap to the last page.
        self._page = jnp.where(positions >= 0, own_page, num_pages)
        self._slot = at % page_size
        self.is_token = positions >= 0

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        with jax.named_scope("kv_write"):
            pages = self.pages = self._written(k, v)
        factor: float = q.shape[-1] ** -0.5 if scale is None else scale
        if self._blocks is None:
            return paged_attention(
                q,
                pages.keys,
                pages.values,
                self._page_table,
                self._positions,
                scale=factor,
                k_scales=pages.key_scales,
                v_scales=pages.value_scales,
                window=window,
                soft_cap=soft_cap,
                backend=self._backend,
            )
        return ragged_paged_attention(
            q,
            pages.keys,
            pages.values,
            self._page_table,
            self._positions,
            self._rows,
            self._blocks,
            scale=factor,
            k_scales=pages.key_scales,
            v_scales=pages.value_scales,
            window=window,
            soft_cap=soft_cap,
            backend=self._backend,
        )

    def _written(self, k: jax.Array, v: jax.Array) -> LayerPages[jax.Array]:
        keys, values, key_scales, value_scales = self.pages
        place = self._page, self._slot
        if key_scales is None or value_scales is None:
            return LayerPages(*write_kv(k, v, keys, values, *place, backend=self._backend))
        return LayerPages(
            *write_quantized_kv(
                k, v, keys, values, key_scales, value_scales, *place, backend=self._backend
            )
        )
