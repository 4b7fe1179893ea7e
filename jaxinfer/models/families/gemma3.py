"""Gemma 3's text decoder (arXiv:2503.19786).

Five layers of six see a window of tokens and turn by their own rotary base; each part of a layer is
normed before and after, q and k are normed before they turn, norms multiply by 1 + weight, and the
embedding is scaled by the root of its width. Old files have rope_theta, rope_scaling and
rope_local_base_freq, transformers 5 writes rope_parameters by layer type.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import FULL, SLIDING
from jaxinfer.models.decoder_layer import SandwichLayer
from jaxinfer.models.families.gemma2 import gemma_fields
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def _fields(keys: HfKeys) -> dict[str, Any]:
    keys.refuse("attn_logit_softcapping", "final_logit_softcapping")
    every = keys.positive("sliding_window_pattern")
    return {**gemma_fields(keys, every=every), "qk_norm": "head", **_ropes(keys)}


def _ropes(keys: HfKeys) -> dict[str, Any]:
    is_new = bool(keys.get("rope_parameters"))
    whole = keys.rope_of(FULL) if is_new else keys
    local = keys.number("rope_local_base_freq")
    if is_new:
        sliding = keys.rope_of(SLIDING)
        if (scaling := sliding.rope_scaling()) is not None:
            raise ConfigError(
                f"config.json: rope_type of {SLIDING} must be default; got {scaling.rope_type!r}"
            )
        local = sliding.rope_theta(default=local)
    return {
        "rope_theta": whole.rope_theta(),
        "rope_scaling": whole.rope_scaling(),
        "rope_local_base_freq": local,
    }


GEMMA3 = Family(SandwichLayer, _fields, DEFAULTS)
