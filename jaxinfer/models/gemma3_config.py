"""Gemma 3's config.json in the words of the other families.

No JAX here. Old files have rope_theta, rope_scaling and rope_local_base_freq, transformers 5 writes
rope_parameters by layer type, and what equals a default may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ConfigError

GEMMA3 = "gemma3_text"  # model_type
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma3_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the old form, with transformers' defaults, and layer_types.

    Raises: ConfigError naming the key that is not supported.
    """
    for key in (*SOFT_CAPS, "use_bidirectional_attention"):
        if hf.get(key):
            raise ConfigError(f"config.json: {key} must be absent for Gemma 3; got {hf[key]!r}")
    given = {key: value for key, value in hf.items() if value is not None}
    keys = DEFAULTS | given | _rope(given)
    keys["hidden_act"] = given.get("hidden_activation", "gelu_pytorch_tanh")
    keys.setdefault("layer_types", _pattern(given))
    return keys


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and rope_local_base_freq out of rope_parameters, if there are."""
    parameters = given.get("rope_parameters")
    if parameters is None:
        return {}
    kinds = [parameters.get(kind) or {} for kind in (FULL, SLIDING)]
    if not all(isinstance(kind, Mapping) for kind in kinds) or parameters.keys() - {FULL, SLIDING}:
        raise ConfigError(
            f"config.json: rope_parameters of Gemma 3 must have one object for {FULL} and one for "
            f"{SLIDING}; got {parameters!r}"
        )
    whole, sliding = kinds
    if sliding.get("rope_type", "default") != "default":
        raise ConfigError(
            f"config.json: rope_type of {SLIDING} must be default; got {sliding['rope_type']!r}"
        )
    keys: dict[str, Any] = {"rope_parameters": None, "rope_scaling": dict(whole)}
    for key, kind in (("rope_theta", whole), ("rope_local_base_freq", sliding)):
        if "rope_theta" in kind:
            keys[key] = kind["rope_theta"]
    return keys


def _pattern(given: Mapping[str, Any]) -> list[str]:
    """Each sixth layer, or what the file says instead of six, has full attention."""
    every, count = given.get("sliding_window_pattern", 6), given.get("num_hidden_layers")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"config.json: sliding_window_pattern must be a positive integer; got {every!r}"
        )
    if not isinstance(count, int):
        return []  # refused by its own name
    return [SLIDING if (i + 1) % every else FULL for i in range(count)]
