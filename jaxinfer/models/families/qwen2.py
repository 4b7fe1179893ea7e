"""Qwen2 and Qwen2.5 (arXiv:2407.10671): a bias on q, k and v, whatever the file says."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys


def _fields(keys: HfKeys) -> dict[str, Any]:
    if keys.flag("use_sliding_window", default=True):
        keys.refuse("sliding_window")
    return {"qkv_bias": True, "out_bias": False}


QWEN2 = Family(PreNormLayer, _fields)
