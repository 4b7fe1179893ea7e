"""Llama (arXiv:2307.09288, arXiv:2407.21783), and what has its shape, such as SmolLM2."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys


def _fields(keys: HfKeys) -> dict[str, Any]:
    if keys.flag("use_sliding_window", default=True):
        keys.refuse("sliding_window")
    return {}


LLAMA = Family(PreNormLayer, _fields)
