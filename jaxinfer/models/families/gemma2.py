"""Gemma 2 (arXiv:2408.00118): every other layer sees a window, scores and logits are capped, each
part of a layer is normed before and after, norms multiply by 1 + weight.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import FULL, SLIDING, LayerKind
from jaxinfer.models.decoder_layer import SandwichLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def gemma_fields(keys: HfKeys, *, every: int) -> dict[str, Any]:
    """Of Gemmas with windows: each `every`th layer, or what the file names, sees all."""
    keys.refuse("use_bidirectional_attention")
    count = keys.positive("num_hidden_layers")
    types = keys.layer_types(SLIDING if (i + 1) % every else FULL for i in range(count))
    return {
        "hidden_act": keys.activation("hidden_activation"),
        "norm_adds_one": True,
        "layer_kinds": tuple(LayerKind(kind) for kind in types),
        "sliding_window": keys.positive("sliding_window"),
        "attention_multiplier": keys.number("query_pre_attn_scalar") ** -0.5,
        "embedding_multiplier": keys.positive("hidden_size") ** 0.5,
    }


def _fields(keys: HfKeys) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return gemma_fields(keys, every=2) | {cap: keys.number(cap) for cap in caps}


GEMMA2 = Family(SandwichLayer, _fields, DEFAULTS)
