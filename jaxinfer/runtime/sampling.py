"""From logits to tokens, on the device, row by row.

Order of the filters as in vLLM: temperature, min-p, top-k, top-p, after penalties (penalties.py).
Nothing is sorted: the k-th largest probability and the nucleus' smallest one are found by bisection
over float bit patterns (non-negative floats order as integers do), 31 masked sums instead of a sort
of the vocabulary.
Tokens that tie with the last one kept are kept too.

A draw is a function of (seed, position) alone: a row's token does not depend on its company.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.config import MIN_ROWS
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.query_blocks import Array
from pallas_kernels.row_sum import row_sum

MAX_TOP = 20  # likeliest tokens that variants `full` and `penalized` report
DRAW_BLOCK = 256  # vocabulary entries that are summed before a draw looks inside
ARGMAX_BLOCK = 256  # vocabulary entries whose maximum is taken before the largest is looked for

Variant = Literal["greedy", "plain", "full", "penalized"]


class SamplingArrays(NamedTuple, Generic[Array]):
    """Per row; the device form of scheduling/batch.py's SamplingBatch."""

    temperature: Array  # float32[N]; 0: greedy
    top_k: Array  # int32[N]; 0: off
    top_p: Array  # float32[N]; 1: off
    min_p: Array  # float32[N]; 0: off
    seeds: Array  # uint32[N, 2]
    positions: Array  # int32[N]


class Sampled(NamedTuple, Generic[Array]):
    """What a step chose."""

    token_ids: Array  # int32[N]
    logprobs: Array  # float32[N]: of the chosen token, before penalties, temperature and filters
    top_ids: Array  # int32[N, MAX_TOP or 0], likeliest first; `full` and `penalized` only
    top_logprobs: Array  # float32[N, MAX_TOP or 0]


def sample(
    logits: jax.Array,
    arrays: SamplingArrays[jax.Array],
    variant: Variant,
    adjusted: jax.Array | None = None,
    *,
    backend: Backend = REFERENCE,
) -> Sampled[jax.Array]:
    """float32[N, V] -> one token per row.

    Variant `greedy` ignores the arrays, `plain` their filters.

    Args:
        adjusted: the logits to choose by, where penalties have changed them; float32[N, V].
    """
    log_sum = log_total(logits, backend)[:, None]
    by = logits if adjusted is None else adjusted
    token_ids = _argmax(by)
    has_all = variant in ("full", "penalized")
    if variant != "greedy":
        top = jnp.max(by, axis=-1, keepdims=True)
        is_drawn = arrays.temperature > 0
        temperature = jnp.where(is_drawn, arrays.temperature, 1.0)[:, None]
        weights = jnp.exp((by - top) / temperature)
        if has_all:
            weights = _filter(weights, arrays, backend)
        token_ids = jnp.where(is_drawn, _draw(weights, arrays, backend), token_ids)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    logprobs = (chosen - log_sum)[:, 0]
    num_top = min(MAX_TOP, logits.shape[1]) if has_all else 0
    top_logits, top_ids = lax.top_k(logits, num_top)
    return Sampled(token_ids, logprobs, top_ids.astype(jnp.int32), top_logits - log_sum)


def log_total(logits: jax.Array, backend: Backend = REFERENCE) -> jax.Array:
    """log(sum(exp)) of float32[N, V] -> float32[N]; its bits do not depend on N."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.log(_row_sum(jnp.exp(logits - top), backend)) + top[:, 0]


def _argmax(x: jax.Array) -> jax.Array:
    """float32[N, V] -> int32[N]: the first of the largest, or the first NaN.

    XLA CPU finds a maximum ten times as fast as the place of one. The barrier keeps it from
    computing x twice.
    """
    num_rows, width = x.shape
    padded = jnp.pad(
        lax.optimization_barrier(x), ((0, 0), (0, -width % ARGMAX_BLOCK)), constant_values=-jnp.inf
    )
    blocks = padded.reshape(num_rows, -1, ARGMAX_BLOCK)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * ARGMAX_BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _row_sum(x: jax.Array, backend: Backend) -> jax.Array:
    return row_sum(x, least_rows=MIN_ROWS * math.prod(x.shape[1:-1]), backend=backend)


def _filter(weights: jax.Array, arrays: SamplingArrays[jax.Array], backend: Backend) -> jax.Array:
    """float32[N, V], largest 1 -> the same with the tokens that a filter removes set to 0."""
    weights = jnp.where(weights >= arrays.min_p[:, None], weights, 0.0)
    vocab_size = weights.shape[1]
    wanted = jnp.where(arrays.top_k > 0, jnp.minimum(arrays.top_k, vocab_size), vocab_size)

    def holds_enough(threshold: jax.Array) -> jax.Array:
        return jnp.sum(weights >= threshold[:, None], axis=-1, dtype=jnp.int32) >= wanted

    kth = _largest_threshold(holds_enough, arrays.top_k > 0)
    weights = jnp.where(weights >= kth[:, None], weights, 0.0)
    needed = arrays.top_p * _row_sum(weights, backend)

    def weighs_enough(threshold: jax.Array) -> jax.Array:
        kept = jnp.where(weights >= threshold[:, None], weights, 0.0)
        return _row_sum(kept, backend) >= needed

    least = _largest_threshold(weighs_enough, arrays.top_p < 1)
    return jnp.where(weights >= least[:, None], weights, 0.0)


def _largest_threshold(
    is_enough: Callable[[jax.Array], jax.Array], is_used: jax.Array
) -> jax.Array:
    """float32[N]: per row the largest t in [0, 1] with is_enough(t); 0 where not used.

    is_enough is true at 0 and falls once. Bisects the 30 bits of the floats up to 1; no work if no
    row uses it.
    """
    one = lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low = jnp.zeros(is_used.shape, jnp.int32)  # enough
    high = jnp.full(is_used.shape, one + 1, jnp.int32)  # too much

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        good = is_enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low, _ = lax.fori_loop(0, jnp.where(is_used.any(), 31, 0), halve, (low, high))
    return jnp.where(is_used, lax.bitcast_convert_type(low, jnp.float32), 0.0)


def _draw(weights: jax.Array, arrays: SamplingArrays[jax.Array], backend: Backend) -> jax.Array:
    """float32[N, V] -> int32[N], each row by inverse distribution function, in two stages.

    The first uniform picks a block of the vocabulary, the second a token inside it, so that a token
    far below float32's resolution of the whole sum can still be drawn.
    """
    num_rows, vocab_size = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -vocab_size % DRAW_BLOCK)))
    blocks = weights.reshape(num_rows, -1, DRAW_BLOCK)
    uniforms = jax.vmap(_uniform_pair)(arrays.seeds, arrays.positions)
    block = _pick(_row_sum(blocks, backend), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    # Only a row of NaN, whose weights a filter makes 0, gets past the last token.
    return jnp.minimum(block * DRAW_BLOCK + _pick(inside, uniforms[:, 1]), vocab_size - 1)


def _uniform_pair(seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.uniform(key, (2,), jnp.float32)


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index of the first running sum above uniform * total: never one of weight 0."""
    running = jnp.cumsum(weights, axis=-1)
    total = running[:, -1]
    target = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.sum(running <= target[:, None], axis=-1, dtype=jnp.int32)
