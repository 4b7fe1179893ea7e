"""What a model leaves for its KV pool: what weights and programs do not take of a card.

Bytes of the programs are what the compiler says (jaxinfer/runtime/program_memory.py adds them up as
the engine does); nothing is measured on a GPU. What the driver and JAX keep for themselves is in
the part that the utilization leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxinfer.models.config import ModelConfig

UTILIZATION = 0.9
CARDS = {
    "a100": {"24 GB": 24 << 30, "40 GB": 40 << 30, "80 GB": 80 << 30},
    "h200": {"141 GB": 150754820096},
}
"""Whose programs a card runs -> bytes of each card. 24 GB are a card of Ampere or Ada."""
SCALE_BYTES = 4  # of int8 KV: a float32 for each token, head, and keys or values


@dataclass(frozen=True, slots=True)
class Room:
    """On one card, in bytes and tokens."""

    card: str
    weights: str  # their format
    weights_bytes: int
    programs_bytes: int
    kv_bytes: int  # 0: the model does not fit
    tokens_bf16: int  # of KV, in bfloat16
    tokens_int8: int  # of KV, in int8


def kv_bytes_per_token(config: ModelConfig, *, is_int8: bool) -> int:
    """In all layers."""
    elements = config.kv_elements_per_token
    if not is_int8:
        return 2 * elements
    return elements + elements // config.head_dim * SCALE_BYTES


def rooms(
    config: ModelConfig,
    weights: str,
    weights_bytes: int,
    programs_bytes: int,
    cards: Mapping[str, int],
) -> Iterator[Room]:
    """On each card: its name and bytes."""
    per_token = [kv_bytes_per_token(config, is_int8=is_int8) for is_int8 in (False, True)]
    for card, size in cards.items():
        left = max(0, math.floor(size * UTILIZATION) - weights_bytes - programs_bytes)
        tokens = [left // each for each in per_token]
        yield Room(card, weights, weights_bytes, programs_bytes, left, *tokens)
