"""Which rows meet which expert: pairs of a token and one of its experts, sorted by expert, in
blocks of one expert each.

No pair is dropped, whatever the experts that tokens choose; a block that is not full ends in rows
of zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ExpertLayout(NamedTuple):
    """B blocks of R rows. Every row is of one pair or of none."""

    token_of: jax.Array  # int32[B * R]: the token whose row it is; T: none
    row_of: jax.Array  # int32[T, k]: the row of each of a token's pairs; B * R: none
    experts: jax.Array  # int32[B]: of 0 to X - 1
    num_blocks: jax.Array  # int32[]: those before it have rows


def block_rows(num_tokens: int, num_per_token: int, num_experts: int, *, least: int) -> int:
    """R: about as many as an expert has of pairs that are spread evenly, from `least` to 64."""
    share = num_tokens * num_per_token // num_experts
    rows = least
    while rows < min(share, 64):
        rows *= 2
    return rows


def num_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """B, enough however pairs are spread: a block that is not full for each expert, and full ones.

    >>> num_blocks(16, 8, 8)
    9
    """
    at_most = min(num_experts, num_pairs)
    return at_most + (num_pairs - at_most) // rows


def lay_out(
    chosen: jax.Array, is_token: jax.Array | None, *, num_experts: int, rows: int
) -> ExpertLayout:
    """Args:
    chosen: int32[T, k], the experts of each token, all different.
    is_token: bool[T]; the others are padding, which meets no expert. None: all are.
    """
    num_tokens, num_per_token = chosen.shape
    num_pairs = chosen.size
    if is_token is not None:
        chosen = jnp.where(is_token[:, None], chosen, num_experts)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    by_expert = flat[order]
    each = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    ends = jnp.cumsum((counts + (rows - 1)) // rows, dtype=jnp.int32)  # in blocks
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    firsts = jnp.cumsum(counts, dtype=jnp.int32) - counts  # in pairs
    count = num_blocks(num_pairs, num_experts, rows)
    known = jnp.minimum(by_expert, num_experts - 1)
    place = starts[known] * rows + jnp.arange(num_pairs, dtype=jnp.int32) - firsts[known]
    place = jnp.where(by_expert < num_experts, place, count * rows)
    token_of = jnp.full(count * rows, num_tokens, jnp.int32)
    token_of = token_of.at[place].set(order // num_per_token, mode="drop")
    row_of = jnp.zeros(num_pairs, jnp.int32).at[order].set(place, unique_indices=True)
    is_past = ends[None, :] <= jnp.arange(count, dtype=jnp.int32)[:, None]
    experts = jnp.minimum(is_past.sum(axis=1, dtype=jnp.int32), each[-1])
    return ExpertLayout(token_of, row_of.reshape(chosen.shape), experts, ends[-1])
