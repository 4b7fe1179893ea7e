"""Qwen3's mixtures of experts (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import FULL, SLIDING, LayerKind
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.families.qwen2_moe import qwen_experts, sparse_layers
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 32_768,
}


def _fields(keys: HfKeys) -> dict[str, Any]:
    has_windows = keys.flag("use_sliding_window")
    kind = SLIDING if has_windows else FULL
    return {
        "qk_norm": "head",
        "layer_kinds": tuple(LayerKind(kind, is_sparse=sparse) for sparse in sparse_layers(keys)),
        "sliding_window": keys.positive("sliding_window") if has_windows else None,
        "experts": qwen_experts(keys),
    }


QWEN3_MOE = Family(PreNormLayer, _fields, DEFAULTS)
