"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import FULL, SLIDING, Experts, LayerKind
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131_072,
}


def _fields(keys: HfKeys) -> dict[str, Any]:
    has_window = keys.get("sliding_window") is not None
    kind = LayerKind(SLIDING if has_window else FULL, is_sparse=True)
    return {
        "layer_kinds": (kind,) * keys.positive("num_hidden_layers"),
        "sliding_window": keys.positive("sliding_window") if has_window else None,
        "experts": Experts(
            count=keys.positive("num_local_experts"),
            per_token=keys.at_most("num_experts_per_tok", "num_local_experts"),
            intermediate_size=keys.positive("intermediate_size"),
            normalizes=True,
        ),
    }


MIXTRAL = Family(PreNormLayer, _fields, DEFAULTS)
