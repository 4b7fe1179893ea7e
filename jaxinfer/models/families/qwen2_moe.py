"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): Qwen2 with a mixture of experts in some or all
layers, and an expert that all tokens share.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import FULL, SLIDING, Experts, LayerKind, LayerType
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 16,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 32_768,
}


def sparse_layers(keys: HfKeys) -> list[bool]:
    """Of each layer of a Qwen whether a mixture of experts stands in it."""
    every, dense = keys.positive("decoder_sparse_step"), keys.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers; got {dense!r}")
    count = keys.positive("num_hidden_layers")
    return [i not in dense and (i + 1) % every == 0 for i in range(count)]


def qwen_experts(keys: HfKeys, *, shared: int | None = None) -> Experts:
    return Experts(
        count=keys.positive("num_experts"),
        per_token=keys.at_most("num_experts_per_tok", "num_experts"),
        intermediate_size=keys.positive("moe_intermediate_size"),
        normalizes=keys.flag("norm_topk_prob"),
        shared_intermediate_size=shared,
    )


def _types(keys: HfKeys) -> tuple[LayerType, ...]:
    """Where windows are on, every other layer below max_window_layers has one."""
    count = keys.positive("num_hidden_layers")
    if not keys.flag("use_sliding_window"):
        return (FULL,) * count
    first = keys.whole("max_window_layers")
    return keys.layer_types(FULL if i % 2 or i >= first else SLIDING for i in range(count))


def _fields(keys: HfKeys) -> dict[str, Any]:
    kinds = zip(_types(keys), sparse_layers(keys), strict=True)
    has_windows = keys.flag("use_sliding_window")
    return {
        "qkv_bias": keys.flag("qkv_bias", default=True),
        "out_bias": False,
        "layer_kinds": tuple(LayerKind(kind, is_sparse=is_sparse) for kind, is_sparse in kinds),
        "sliding_window": keys.positive("sliding_window") if has_windows else None,
        "experts": qwen_experts(keys, shared=keys.positive("shared_expert_intermediate_size")),
    }


QWEN2_MOE = Family(PreNormLayer, _fields, DEFAULTS)
