"""Penalties, logit biases and masks: what changes a row's logits before its token is chosen.

Order and formulas as in vLLM: logit bias, repetition, frequency, presence; before temperature and
filters, and before the arg-max of a greedy row. Last, what a row's grammar does not admit becomes
-inf.

A compiler may make one instruction of a product and a sum, with one rounding instead of two, in one
shape and not in another. No bit may depend on that, so there is no such pair here: the repetition
penalty only divides, and the products of the frequency penalty are exact. A logit that nothing
applies to is selected, not computed, so it keeps its bits.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.scheduling.buckets import HISTORY_TILE
from pallas_kernels.query_blocks import Array

MAX_COUNT = 2**16 - 1  # times that a token counts; a product of 8 and 16 bits is exact


class PenaltyArrays(NamedTuple, Generic[Array]):
    """Per row; the device form of scheduling/batch.py's PenaltyBatch."""

    history: Array  # int32[N, H]: prompt and output; H a multiple of HISTORY_TILE
    num_known: Array  # int32[N]: tokens of it
    num_prompt: Array  # int32[N]: of these, at its beginning
    from_seat: Array  # int32[N]: the place in `newest` of one more output token; -1: none
    repetition: Array  # float32[N]; 1: off
    presence: Array  # float32[N]; 0: off
    frequency: Array  # float32[N]; 0: off
    bias_ids: Array  # int32[N, B]; -1 pads
    bias: Array  # float32[N, B]
    mask: Array  # int32[N, ceil(V / 32)]: bit i % 32 of word i // 32 admits token i


def penalized(
    logits: jax.Array, penalties: PenaltyArrays[jax.Array], newest: jax.Array
) -> jax.Array:
    """float32[N, V] -> the same after bias, penalties and mask.

    Args:
        newest: int32[R], the last token drawn in each seat, before this step's draw.
    """
    logits = _biased(logits, penalties)
    in_prompt, in_output = _counts(penalties, newest, logits.shape[1])
    repetition = penalties.repetition[:, None]
    divisor = jnp.where(logits > 0, repetition, 1 / repetition)
    logits = jnp.where(in_prompt + in_output > 0, logits / divisor, logits)
    lowered = logits
    for part in _short_parts(penalties.frequency):
        times = jnp.minimum(in_output, MAX_COUNT).astype(jnp.float32)
        lowered = lowered - part[:, None] * times
    lowered = lowered - penalties.presence[:, None]
    logits = jnp.where(in_output > 0, lowered, logits)
    return jnp.where(_admitted(penalties.mask, logits.shape[1]), logits, -jnp.inf)


def _biased(logits: jax.Array, penalties: PenaltyArrays[jax.Array]) -> jax.Array:
    num_rows, vocab_size = logits.shape
    ids = jnp.where(penalties.bias_ids >= 0, penalties.bias_ids, vocab_size)
    return logits.at[jnp.arange(num_rows)[:, None], ids].add(penalties.bias, mode="drop")


def _counts(
    penalties: PenaltyArrays[jax.Array], newest: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """int32[N, V] each: how often a token is in a row's prompt, and in its output."""
    history, seats = penalties.history, penalties.from_seat
    num_rows = history.shape[0]
    rows = jnp.arange(num_rows)[:, None]

    def count(tile: jax.Array, counts: jax.Array) -> jax.Array:
        start = tile * HISTORY_TILE
        ids = lax.dynamic_slice(history, (0, start), (num_rows, HISTORY_TILE))
        places = (start + jnp.arange(HISTORY_TILE))[None]
        ids = jnp.where(places < penalties.num_known[:, None], ids, vocab_size)
        is_output = (places >= penalties.num_prompt[:, None]).astype(jnp.int32)
        return counts.at[rows, is_output, ids].add(1, mode="drop")

    num_tiles = -(-jnp.max(penalties.num_known) // HISTORY_TILE)
    counts = lax.fori_loop(0, num_tiles, count, jnp.zeros((num_rows, 2, vocab_size), jnp.int32))
    ids = jnp.where(seats >= 0, newest[jnp.maximum(seats, 0)], vocab_size)
    counts = counts.at[rows[:, 0], 1, ids].add(1, mode="drop")
    return counts[:, 0], counts[:, 1]


def _admitted(mask: jax.Array, vocab_size: int) -> jax.Array:
    """int32[N, ceil(V / 32)] -> bool[N, V]."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] != 0


def _short_parts(x: jax.Array) -> list[jax.Array]:
    """Three of 8 significant bits each, whose sum is x (float32 has 24)."""
    parts: list[jax.Array] = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16))
        parts.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - parts[-1]
    return parts
