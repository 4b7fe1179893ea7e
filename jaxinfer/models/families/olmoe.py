"""OLMoE (arXiv:2409.02060): a mixture of experts in every layer, all queries of a token normed as
one vector and all keys as one.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import Experts, LayerKind
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}


def _fields(keys: HfKeys) -> dict[str, Any]:
    keys.refuse("clip_qkv")
    return {
        "qk_norm": "whole",
        "layer_kinds": (LayerKind(is_sparse=True),) * keys.positive("num_hidden_layers"),
        "experts": Experts(
            count=keys.positive("num_experts"),
            per_token=keys.at_most("num_experts_per_tok", "num_experts"),
            intermediate_size=keys.positive("intermediate_size"),
            normalizes=keys.flag("norm_topk_prob"),
        ),
    }


OLMOE = Family(PreNormLayer, _fields, DEFAULTS)
