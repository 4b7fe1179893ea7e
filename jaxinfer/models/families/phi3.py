"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2503.01743): Llama whose q, k and v are one product in
the file, as gate and up are (checkpoints/layout.py); of Phi-4-mini's heads a part turns.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.families.mistral import one_window
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


def _fields(keys: HfKeys) -> dict[str, Any]:
    scaling = keys.rope_scaling()
    if scaling is not None and scaling.rope_type != "longrope":  # transformers has no other for it
        raise ConfigError(
            f"config.json: rope_type of Phi3ForCausalLM must be default or longrope; got "
            f"{scaling.rope_type!r}"
        )
    return {"partial_rotary_factor": keys.partial_rotary_factor(), **one_window(keys)}


PHI3 = Family(PreNormLayer, _fields, DEFAULTS)
