"""What a model leaves for its KV pool: what weights and programs do not take of a card.

Bytes of the programs are what the compiler says (jaxinfer/runtime/program_memory.py adds them up as
the engine does); nothing is measured on a GPU. What the driver and JAX keep for themselves is in
the part that the utilization leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.models.config import ModelConfig

UTILIZATION = 0.9
CARDS = {
    "a100": {"24 GB": 24 << 30, "40 GB": 40 << 30, "80 GB": 80 << 30},
    "h200": {"141 GB": 150754820096},
}
"""Whose programs a card runs -> bytes of each card. 24 GB are a card of Ampere or Ada."""
SCALE_BYTES = 4  # of float32


@dataclass(frozen=True, slots=True)
class WeightKind:
    """How the products inside the layers keep their weights; all else is bfloat16."""

    name: str
    bits: int
    group_size: int | None = None  # inputs that share a scale; None: there are no scales

    def nbytes(self, elements: int) -> int:
        scales = elements // self.group_size * SCALE_BYTES if self.group_size else 0
        return elements * self.bits // 8 + scales


WEIGHTS = (WeightKind("bf16", 16), WeightKind("int8", 8, 128), WeightKind("int4", 4, 128))


@dataclass(frozen=True, slots=True)
class Room:
    """On one card, in bytes and tokens."""

    card: str
    weights: str
    weights_bytes: int
    programs_bytes: int
    kv_bytes: int  # 0: the model does not fit
    tokens_bf16: int  # of KV, in bfloat16
    tokens_int8: int  # of KV, in int8 with a scale per token and head


def weights_bytes(param_shapes: dict[str, Any], kind: WeightKind) -> int:
    """Of a bfloat16 model's parameters, with its layers' products in `kind`."""
    layers = jax.tree.leaves(param_shapes["layers"])
    products = sum(leaf.size for leaf in layers if len(leaf.shape) == 2)
    everything = sum(leaf.size for leaf in jax.tree.leaves(param_shapes))
    return 2 * (everything - products) + kind.nbytes(products)


def kv_bytes_per_token(config: ModelConfig, *, is_int8: bool) -> int:
    """In all layers."""
    elements = config.kv_elements_per_token
    if not is_int8:
        return 2 * elements
    return elements + elements // config.head_dim * SCALE_BYTES


def rooms(
    config: ModelConfig, param_shapes: dict[str, Any], programs_bytes: int, cards: dict[str, int]
) -> Iterator[Room]:
    """For each card and kind of weights."""
    per_token = [kv_bytes_per_token(config, is_int8=is_int8) for is_int8 in (False, True)]
    for card, size in cards.items():
        for kind in WEIGHTS:
            weights = weights_bytes(param_shapes, kind)
            left = max(0, math.floor(size * UTILIZATION) - weights - programs_bytes)
            tokens = [left // each for each in per_token]
            yield Room(card, kind.name, weights, programs_bytes, left, *tokens)
