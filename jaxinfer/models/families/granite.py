"""Granite 3 (its dense models): Llama with four multipliers (arXiv:2407.13739)."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)


def _fields(keys: HfKeys) -> dict[str, Any]:
    return {key: keys.number(key, default=1.0) for key in MULTIPLIERS}


GRANITE = Family(PreNormLayer, _fields)
