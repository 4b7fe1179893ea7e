"""Mistral (arXiv:2310.06825): Llama whose layers all see a window, if the file has one."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import SLIDING, LayerKind
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys


def one_window(keys: HfKeys) -> dict[str, Any]:
    """Of all layers, where the file has one."""
    if keys.get("sliding_window") is None:
        return {}
    return {
        "layer_kinds": (LayerKind(SLIDING),) * keys.positive("num_hidden_layers"),
        "sliding_window": keys.positive("sliding_window"),
    }


MISTRAL = Family(PreNormLayer, one_window, {"num_key_value_heads": 8})
