"""A family of decoders: its module for a layer, and how its config.json is read.

Each file of families/ has one, and registry.py their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder_layer import MakeLayer
from jaxinfer.models.hf_keys import MAX_POSITIONS, MAX_SIZE, HfKeys
from jaxinfer.models.rope_keys import check_pairs


def _nothing(keys: HfKeys) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """What one `architectures` of config.json means.

    layer: its class.
    fields: of `ModelConfig`, as the family has them: they win over those that all have in common.
    defaults: transformers', for keys that a config.json of the family may leave out.
    """

    layer: MakeLayer
    fields: Callable[[HfKeys], dict[str, Any]] = _nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def config(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Raises: ConfigError naming the key that is absent or not supported."""
        keys = HfKeys(hf, self.defaults)
        heads = keys.positive("num_attention_heads")
        hidden = keys.positive("hidden_size")
        kv_heads = keys.positive("num_key_value_heads", default=heads)
        head_dim = keys.positive("head_dim", default=hidden // heads)
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads ({heads}) must be a multiple of "
                f"num_key_value_heads ({kv_heads})"
            )
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim must be even for RoPE; got {head_dim}")
        keys.refuse_unsupported()
        own = self.fields(keys)
        if "partial_rotary_factor" not in own:
            keys.refuse_partial_rotary()
        has_bias = keys.flag("attention_bias")
        rope: dict[str, Any] = (
            {}
            if "rope_theta" in own
            else {
                "rope_theta": keys.rope_theta(),
                "rope_scaling": keys.rope_scaling(),
            }
        )
        common = ModelConfig(
            vocab_size=keys.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.positive("intermediate_size"),
            num_hidden_layers=keys.positive("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=keys.positive(MAX_POSITIONS),
            rms_norm_eps=keys.number("rms_norm_eps", default=1e-6),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=has_bias,
            out_bias=has_bias,
            mlp_bias=keys.flag("mlp_bias"),
            hidden_act=own.get("hidden_act") or keys.activation(),
            **rope,
        )
        config = _reaching(replace(common, **own))
        check_pairs(config)
        return config


def _reaching(config: ModelConfig) -> ModelConfig:
    """With as many positions as YaRN stretches it to: files keep those of the training."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return config
    reach = int(scaling.original_max_position_embeddings * scaling.factor)
    longest = max(min(reach, MAX_SIZE), config.max_position_embeddings)
    return replace(config, max_position_embeddings=longest)
