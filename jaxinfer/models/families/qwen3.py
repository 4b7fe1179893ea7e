"""Qwen3 (arXiv:2505.09388): each query and key head is normed before it turns."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.families.qwen2 import DEFAULTS, windows
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys


def _fields(keys: HfKeys) -> dict[str, Any]:
    return {"qk_norm": "head", **windows(keys)}


QWEN3 = Family(PreNormLayer, _fields, DEFAULTS | {"head_dim": 128})
