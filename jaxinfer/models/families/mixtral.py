"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxinfer.models.config import Experts, LayerKind
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.families.mistral import one_window
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
    window = one_window(keys)
    kinds = window.get("layer_kinds") or (LayerKind(),) * keys.positive("num_hidden_layers")
    return {
        **window,
        "layer_kinds": tuple(replace(kind, is_sparse=True) for kind in kinds),
        "experts": Experts(
            count=keys.positive("num_local_experts"),
            per_token=keys.at_most("num_experts_per_tok", "num_local_experts"),
            intermediate_size=keys.positive("intermediate_size"),
            normalizes=True,
        ),
    }


MIXTRAL = Family(PreNormLayer, _fields, DEFAULTS)
