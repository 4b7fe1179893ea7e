"""Sequences whose keys and values lie on pages in random order, and attention over them by others.

`gathered` is what plain XLA makes of it, `exact` is float64 on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.case import Arrays
from bench.kernels.random_arrays import normal, positive, shuffled, small_ints
from bench.kernels.sizes import Sizes

INT8_SCALE = 1 / 64


@dataclass(frozen=True, slots=True)
class PagedWorld:
    k_pages: jax.Array  # bf16 or int8 [P, K, S, D]
    v_pages: jax.Array
    scales: Arrays  # of int8 pages: float32[P, K, S] of keys and of values
    page_table: jax.Array  # int32[rows, M]


def make_world(sizes: Sizes, rows: int, context: int, number: int, *, is_int8: bool) -> PagedWorld:
    """`context` tokens for each row."""
    width = -(-context // sizes.page_size)
    shape = (rows * width, sizes.kv_heads, sizes.page_size, sizes.head_dim)
    table = jnp.asarray(shuffled(number, rows * width).reshape(rows, width))
    if not is_int8:
        k, v = (normal(2 * number + i, shape, jnp.bfloat16) for i in range(2))
        return PagedWorld(k, v, (), table)
    k, v = (small_ints(2 * number + i, shape, -127, 127) for i in range(2))
    scales = tuple(positive(2 * number + i, shape[:3], INT8_SCALE) for i in range(2))
    return PagedWorld(k, v, scales, table)


def gathered(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *scales: jax.Array,
) -> jax.Array:
    """Attention of q [N, Q, H, D] at positions int32[N, Q], with the pages copied to one place."""
    num_rows, num_queries, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    grouped = q.reshape(num_rows, num_queries, kv_heads, heads // kv_heads, head_dim)
    k, v = (pages[page_table].astype(q.dtype) for pages in (k_pages, v_pages))
    scores = jnp.einsum("nqkgd,nmksd->nqkgms", grouped, k, preferred_element_type=jnp.float32) * (
        head_dim**-0.5
    )
    if scales:
        scores = scores * _by_query(scales[0][page_table])
    place = jnp.arange(page_table.shape[1] * page_size, dtype=jnp.int32)
    is_seen = place[None, None, :] <= positions[:, :, None]
    is_seen = is_seen.reshape(num_rows, num_queries, 1, 1, -1, page_size)
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -1e30), axis=(-2, -1))
    if scales:
        weights = weights * _by_query(scales[1][page_table])
    out = jnp.einsum(
        "nqkgms,nmksd->nqkgd", weights.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return out.reshape(q.shape).astype(q.dtype)


def _by_query(scales: jax.Array) -> jax.Array:
    """[N, M, K, S] -> [N, 1, K, 1, M, S]."""
    return scales.transpose(0, 2, 1, 3)[:, None, :, None]


def exact(q: Any, world: PagedWorld, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64[T, H, D] of q [T, H, D]; token i attends to 0..positions[i] of row rows[i]."""
    queries, table = np.asarray(q, np.float64), np.asarray(world.page_table)
    parts = (np.asarray(world.k_pages), np.asarray(world.v_pages))
    scales = [np.asarray(scale, np.float64)[..., None] for scale in world.scales] or [1.0, 1.0]
    out = np.empty_like(queries)
    page_size = parts[0].shape[2]
    for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
        held = table[row, : position // page_size + 1]
        own = [
            (pages[held] * _own(scale, held)).astype(np.float64)
            for pages, scale in zip(parts, scales, strict=True)
        ]
        out[token] = _attend(queries[token], *(_tokens(pages, position + 1) for pages in own))
    return out


def _own(scale: Any, pages: np.ndarray) -> Any:
    return scale if isinstance(scale, float) else scale[pages]


def _tokens(pages: np.ndarray, length: int) -> np.ndarray:
    """[M, K, S, D] -> [K, length, D]."""
    _, kv_heads, _, head_dim = pages.shape
    return pages.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :length]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[H, D] over [K, length, D]."""
    grouped = q.reshape(k.shape[0], -1, q.shape[1])
    scores = np.einsum("kgd,kud->kgu", grouped, k) * q.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgu,kud->kgd", weights, v).reshape(q.shape)
