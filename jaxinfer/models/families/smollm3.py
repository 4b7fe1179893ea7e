"""SmolLM3: Llama whose every fourth layer does not turn queries and keys (arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import FULL, SLIDING, LayerKind
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}


def _fields(keys: HfKeys) -> dict[str, Any]:
    ropes = _has_rope(keys)
    has_windows = keys.flag("use_sliding_window") and keys.get("sliding_window") is not None
    types = keys.layer_types(FULL if rope or not has_windows else SLIDING for rope in ropes)
    if not has_windows:  # transformers' layers see all then, whatever their type
        types = (FULL,) * len(types)
    kinds = zip(types, ropes, strict=True)
    return {
        "layer_kinds": tuple(LayerKind(kind, rope) for kind, rope in kinds),
        "sliding_window": keys.positive("sliding_window") if has_windows else None,
    }


def _has_rope(keys: HfKeys) -> list[bool]:
    """Of each layer; despite its name, no_rope_layers is 1 where there is rope."""
    count, every = keys.positive("num_hidden_layers"), keys.positive("no_rope_layer_interval")
    given = keys.get("no_rope_layers")
    if not given:
        return [(i + 1) % every != 0 for i in range(count)]
    if not isinstance(given, list) or len(given) != count or any(x not in (0, 1) for x in given):
        raise ConfigError(
            f"config.json: no_rope_layers must be 0 or 1 for each of {count} layers; "
            f"got {given!r:.100}"
        )
    return [bool(x) for x in given]


SMOLLM3 = Family(PreNormLayer, _fields, DEFAULTS)
