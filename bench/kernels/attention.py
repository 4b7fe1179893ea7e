"""Attention over KV pages: decode rows, and a prefill chunk."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.attention_world import PagedWorld, exact, gathered, make_world
from bench.kernels.case import Case, Check, Form, Operands, kernel_forms
from bench.kernels.costs import decode_cost, prefill_cost
from bench.kernels.random_arrays import normal
from bench.kernels.sizes import Sizes
from jaxinfer.scheduling.buckets import Buckets
from pallas_kernels.backend import Backend
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.query_blocks import NARROW_GROUP, QueryBlocks
from pallas_kernels.ragged_attention import ragged_paged_attention

SHIPPED_TOKENS, SHIPPED_SPLITS = 128, 16  # of JAX's kernel: its defaults for pages of 16 tokens


def cases(sizes: Sizes) -> Iterator[Case]:
    heads, page_size = (sizes.heads, sizes.kv_heads, sizes.head_dim), sizes.page_size
    for is_int8, kind in ((False, "bf16"), (True, "int8")):
        for context in sizes.contexts:
            for rows in sizes.rows:
                yield Case(
                    f"decode {kind}, {rows} x {context}",
                    decode_cost([context] * rows, *heads, page_size=page_size, is_int8=is_int8),
                    partial(_decode_operands, sizes, rows, context, is_int8),
                    partial(_decode_forms, rows),
                    None if is_int8 else partial(_torch_attention, sizes, (rows, 1, context)),
                )
        for tokens in sizes.chunks:
            yield Case(
                f"prefill {kind}, {tokens} tokens",
                prefill_cost([(0, tokens)], *heads, page_size=page_size, is_int8=is_int8),
                partial(_prefill_operands, sizes, tokens, is_int8),
                _prefill_forms,
                None if is_int8 else partial(_torch_attention, sizes, (1, tokens, tokens)),
            )


def checks(sizes: Sizes, backend: Backend) -> Iterator[Check]:
    for is_int8, kind in ((False, "bf16"), (True, "int8")):
        yield _decode_check(sizes, backend, f"decode {kind}", is_int8=is_int8)
        yield _prefill_check(sizes, backend, f"prefill {kind}", is_int8=is_int8)


def _decode_operands(sizes: Sizes, rows: int, context: int, is_int8: bool, number: int) -> Operands:
    """Padding rows up to what the kernel takes come last; they have no KV."""
    world = make_world(sizes, rows, context, number, is_int8=is_int8)
    q = normal(number, (rows, sizes.heads, sizes.head_dim), jnp.bfloat16)
    positions = jnp.full(rows, context - 1, jnp.int32)
    padded = _padded(q, world.page_table, positions)
    return Operands((), (padded[0], world.k_pages, world.v_pages, *padded[1:], *world.scales))


def _padded(
    q: jax.Array, page_table: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    more = -len(q) % NARROW_GROUP
    return (
        jnp.pad(q, ((0, more), (0, 0), (0, 0))),
        jnp.pad(page_table, ((0, more), (0, 0))),
        jnp.pad(positions, (0, more), constant_values=-1),
    )


def _decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *scales: jax.Array,
    backend: Backend,
) -> jax.Array:
    k_scales, v_scales = scales or (None, None)
    return paged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        scale=q.shape[-1] ** -0.5,
        k_scales=k_scales,
        v_scales=v_scales,
        backend=backend,
    )


def _decode_forms(rows: int, backend: Backend) -> dict[str, Form]:
    """XLA's and JAX's forms are not given padding rows."""

    def real(operands: Operands) -> Operands:
        q, k_pages, v_pages, page_table, positions, *scales = operands.read
        own = (q[:rows], k_pages, v_pages, page_table[:rows], positions[:rows])
        return Operands((), (*own, *scales))

    def each_alone(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        table: jax.Array,
        at: jax.Array,
        *scales: jax.Array,
    ) -> jax.Array:
        return gathered(q[:, None], k, v, table, at[:, None], *scales)

    forms = kernel_forms(_decode, has_fast=True)(backend)
    forms["XLA"] = Form(each_alone, prepare=real)
    shipped = _shipped()
    if shipped is not None:
        forms["JAX"] = Form(shipped, prepare=lambda operands: _by_head(real(operands)))
    return forms


def _shipped() -> Callable[..., jax.Array] | None:
    """JAX's own kernel: deprecated, and no longer there one day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as theirs
        except ImportError:
            return None

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array, *scales: Any
    ) -> jax.Array:
        pages = max(1, SHIPPED_TOKENS // k.shape[2])
        splits = math.gcd(SHIPPED_SPLITS, table.shape[1])
        return theirs(
            q,
            k,
            v,
            table,
            lengths,
            *scales,
            pages_per_compute_block=math.gcd(pages, table.shape[1] // splits),
            k_splits=splits,
        )

    return run


def _by_head(operands: Operands) -> Operands:
    """Pools [K, P, S, D], scales [K, P, S], lengths in place of positions."""
    q, k_pages, v_pages, page_table, positions, *scales = operands.read
    k, v, *scales = (pool.swapaxes(0, 1) for pool in (k_pages, v_pages, *scales))
    return Operands((), (q, k, v, page_table, positions + 1, *scales))


def _prefill_operands(sizes: Sizes, tokens: int, is_int8: bool, number: int) -> Operands:
    """One sequence from its first token on."""
    world = make_world(sizes, 1, tokens, number, is_int8=is_int8)
    q = normal(number, (tokens, sizes.heads, sizes.head_dim), jnp.bfloat16)
    return _prefill_of(sizes, world, q, first=0, bucket=tokens)


def _prefill_of(
    sizes: Sizes, world: PagedWorld, q: jax.Array, *, first: int, bucket: int
) -> Operands:
    """A chunk of consecutive tokens of row 0, packed into a step of `bucket` tokens."""
    length = len(q)
    positions = np.full(bucket, -1, np.int32)
    positions[:length] = first + np.arange(length)
    rows, blocks = jnp.zeros(bucket, jnp.int32), _blocks(sizes, length, bucket)
    table = (world.page_table, jnp.asarray(positions), rows, *map(jnp.asarray, blocks))
    padded = jnp.pad(q, ((0, bucket - length), (0, 0), (0, 0)))
    return Operands((), (padded, world.k_pages, world.v_pages, *table, *world.scales))


def _blocks(sizes: Sizes, length: int, bucket: int) -> QueryBlocks[np.ndarray]:
    """A token alone as a narrow block, several as wide ones, among as many as the engine has."""
    buckets = Buckets.for_limits(
        max_num_seqs=sizes.rows[-1],
        max_num_batched_tokens=bucket,
        max_model_len=sizes.contexts[-1],
        page_size=sizes.page_size,
    )
    narrow = np.full(buckets.max_rows, bucket, np.int32)
    block_q = buckets.block_q(bucket)
    wide = np.full(buckets.wide_blocks(bucket) * block_q, bucket, np.int32)
    is_alone = length == 1
    (narrow if is_alone else wide)[:length] = np.arange(length)
    return QueryBlocks(
        narrow,
        np.asarray(is_alone, np.int32),
        wide.reshape(-1, block_q),
        np.asarray(0 if is_alone else -(-length // block_q), np.int32),
    )


def _prefill(*operands: jax.Array, backend: Backend) -> jax.Array:
    q, k_pages, v_pages, page_table, positions, rows, *rest = operands
    blocks, scales = QueryBlocks(*rest[:4]), rest[4:]
    k_scales, v_scales = scales or (None, None)
    return ragged_paged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        rows,
        blocks,
        scale=q.shape[-1] ** -0.5,
        k_scales=k_scales,
        v_scales=v_scales,
        backend=backend,
    )


def _prefill_forms(backend: Backend) -> dict[str, Form]:
    def whole(*operands: jax.Array) -> jax.Array:
        q, k_pages, v_pages, page_table, positions = operands[:5]
        scales = operands[10:]
        return gathered(q[None], k_pages, v_pages, page_table, positions[None], *scales)

    forms = kernel_forms(_prefill, has_fast=True)(backend)
    forms["XLA"] = Form(whole)
    return forms


def _decode_check(sizes: Sizes, backend: Backend, name: str, *, is_int8: bool) -> Check:
    """Rows of every length up to the longest context."""
    most, context = sizes.checked[-1], sizes.contexts[-1]
    world = make_world(sizes, most, context, 0, is_int8=is_int8)
    q = normal(0, (most, sizes.heads, sizes.head_dim), jnp.bfloat16)
    positions = (np.arange(most) + 1) * context // most - 1
    run = jax.jit(partial(_decode, backend=backend))

    def rows(number: int) -> np.ndarray:
        own = _padded(
            q[:number], world.page_table[:number], jnp.asarray(positions[:number], jnp.int32)
        )
        out = run(own[0], world.k_pages, world.v_pages, *own[1:], *world.scales)
        return np.asarray(out)[:number]

    return Check(name, rows, lambda: exact(q, world, np.arange(most), positions), bound=5e-3)


def _prefill_check(sizes: Sizes, backend: Backend, name: str, *, is_int8: bool) -> Check:
    """Chunks of several lengths from one position on; one of a single token is a decode row."""
    most, context = sizes.checked[-1], sizes.contexts[0]
    world = make_world(sizes, 1, context, 0, is_int8=is_int8)
    q = normal(1, (most, sizes.heads, sizes.head_dim), jnp.bfloat16)
    first = context - most
    run = jax.jit(partial(_prefill, backend=backend))

    def rows(number: int) -> np.ndarray:
        bucket = -(-number // NARROW_GROUP) * NARROW_GROUP
        out = run(*_prefill_of(sizes, world, q[:number], first=first, bucket=bucket).read)
        return np.asarray(out)[:number]

    where = (np.zeros(most, np.int32), first + np.arange(most))
    return Check(name, rows, lambda: exact(q, world, *where), bound=5e-3)


def _torch_attention(sizes: Sizes, shape: tuple[int, int, int], torch: Any) -> Callable[[], object]:
    """Args: shape: rows, queries of each, context. Keys and values are not on pages."""
    rows, queries, context = shape
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(rows, sizes.heads, queries, sizes.head_dim, **kind)
    k, v = (torch.randn(rows, sizes.kv_heads, context, sizes.head_dim, **kind) for _ in "kv")
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=queries > 1, enable_gqa=True)
