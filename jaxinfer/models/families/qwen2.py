"""Qwen2 and Qwen2.5 (arXiv:2407.10671): a bias on q, k and v, whatever the file says."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import FULL, SLIDING, LayerKind
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}


def windows(keys: HfKeys) -> dict[str, Any]:
    """Qwen's layers from max_window_layers on see a window, where the file turns that on."""
    if not keys.flag("use_sliding_window"):
        return {}
    first = keys.whole("max_window_layers")
    count = keys.positive("num_hidden_layers")
    types = keys.layer_types(SLIDING if i >= first else FULL for i in range(count))
    return {
        "layer_kinds": tuple(LayerKind(kind) for kind in types),
        "sliding_window": keys.positive("sliding_window"),
    }


def _fields(keys: HfKeys) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, **windows(keys)}


QWEN2 = Family(PreNormLayer, _fields, DEFAULTS)
