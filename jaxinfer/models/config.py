"""A decoder's shape, in Hugging Face's words.

No JAX here. Keys that are known to change the arithmetic of this family are read or refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from checkpoints.formats import METHOD
from jaxinfer.errors import ConfigError
from jaxinfer.models.gemma3_config import GEMMA3, gemma3_keys

Activation = Literal["silu", "gelu_tanh"]
LayerType = Literal["full_attention", "sliding_attention"]
ACTIVATIONS: dict[Any, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as the next two
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Keys as in a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2, and Llama's attention_bias
    out_bias: bool = False  # Llama's attention_bias
    mlp_bias: bool = False
    hidden_act: Activation = "silu"
    query_pre_attn_scalar: float | None = None  # None: head_dim
    layer_types: tuple[LayerType, ...] = ()  # of each layer; empty: full_attention
    sliding_window: int | None = None  # tokens that a sliding layer sees, the newest included
    rope_local_base_freq: float = 10000.0  # rope_theta of sliding layers, which have no scaling

    @property
    def attention_scale(self) -> float:
        """Multiplies q·k."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def layer_type(self, layer: int) -> LayerType:
        return self.layer_types[layer] if self.layer_types else "full_attention"

    def window_of(self, layer_type: LayerType) -> int | None:
        """Tokens that a query of such a layer sees, itself included; None: all before it."""
        return self.sliding_window if layer_type == "sliding_attention" else None

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token keeps in the KV pool, all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads config.json's keys.

        Raises: ConfigError naming the key that is absent or not supported.
        """
        is_gemma3 = hf.get("model_type") == GEMMA3
        hf = gemma3_keys(hf) if is_gemma3 else hf
        reader = _HfKeys(hf)
        heads = reader.positive("num_attention_heads")
        hidden = reader.positive("hidden_size")
        kv_heads = reader.positive("num_key_value_heads", default=heads)
        head_dim = reader.positive("head_dim", default=hidden // heads)
        num_layers = reader.positive("num_hidden_layers")
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads ({heads}) must be a multiple of "
                f"num_key_value_heads ({kv_heads})"
            )
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim must be even for RoPE; got {head_dim}")
        reader.refuse_unsupported()
        if not is_gemma3:
            reader.refuse_window()
        is_qwen2 = hf.get("model_type") == "qwen2"
        attention_bias = bool(hf.get("attention_bias", False))
        return cls(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.positive("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=reader.positive("max_position_embeddings"),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope_theta=reader.rope_theta(),
            rope_scaling=reader.rope_scaling(),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or is_qwen2,
            out_bias=attention_bias and not is_qwen2,  # Qwen2 has none, whatever the key says
            mlp_bias=bool(hf.get("mlp_bias", False)),
            hidden_act=reader.activation(),
            **(reader.layers(num_layers) if is_gemma3 else {}),
        )


class _HfKeys:
    """Reads one config.json, with its old and new spellings."""

    def __init__(self, hf: Mapping[str, Any]):
        self._hf = hf
        # transformers 5 writes rope_parameters; older files rope_theta and rope_scaling.
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
            raise ConfigError(
                "config.json: rope_parameters or rope_scaling must be one flat object; "
                f"got {rope!r}"
            )
        self._rope: Mapping[str, Any] = rope

    def positive(self, key: str, *, default: int | None = None) -> int:
        value = self._hf.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: {key} must be a positive integer; got {value!r}")
        return value

    def rope_theta(self) -> float:
        return self._number("rope_theta", self._rope.get("rope_theta", 10000.0))

    def _number(self, key: str, default: float) -> float:
        value = self._hf.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"config.json: {key} must be a positive number; got {value!r}")
        return float(value)

    def layers(self, num_layers: int) -> dict[str, Any]:
        """Fields of models whose layers are not all alike."""
        types, known = self._hf["layer_types"], get_args(LayerType)
        if not isinstance(types, list | tuple) or not all(kind in known for kind in types):
            raise ConfigError(f"config.json: layer_types must be of {known}; got {types!r}")
        if len(types) != num_layers:
            raise ConfigError(
                f"config.json: layer_types must name each of {num_layers} layers; got {len(types)}"
            )
        return {
            "layer_types": tuple(types),
            "sliding_window": self.positive("sliding_window"),
            "query_pre_attn_scalar": self._number("query_pre_attn_scalar", 0.0),
            "rope_local_base_freq": self._number("rope_local_base_freq", 0.0),
        }

    def activation(self) -> Activation:
        name = self._hf.get("hidden_act", self._hf.get("hidden_activation", "silu"))
        found = ACTIVATIONS.get(name) if isinstance(name, str) else None
        if found is None:
            raise ConfigError(
                f"config.json: hidden_act must be one of {', '.join(ACTIVATIONS)}; got {name!r}"
            )
        return found

    def rope_scaling(self) -> RopeScaling | None:
        kind = self._rope.get("rope_type", self._rope.get("type", "default"))
        if kind == "default":
            return None
        if kind not in ("linear", "llama3"):
            raise ConfigError(
                f"config.json: rope_type must be default, linear or llama3; got {kind!r}"
            )
        try:
            scaling = RopeScaling(
                rope_type=kind,
                factor=float(self._rope["factor"]),
                low_freq_factor=float(self._rope.get("low_freq_factor", 1.0)),
                high_freq_factor=float(self._rope.get("high_freq_factor", 4.0)),
                original_max_position_embeddings=int(
                    self._rope.get("original_max_position_embeddings", 8192)
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"config.json: rope scaling of type {kind!r} needs numbers for its keys; "
                f"got {dict(self._rope)!r}"
            ) from error
        band = scaling.high_freq_factor - scaling.low_freq_factor
        if not (0 < scaling.factor < math.inf and 0 < band < math.inf):
            raise ConfigError(
                f"config.json: rope scaling needs a positive factor and high_freq_factor above "
                f"low_freq_factor; got {dict(self._rope)!r}"
            )
        return scaling

    def refuse_unsupported(self) -> None:
        quantization = self._hf.get("quantization_config")
        if quantization and not (
            isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD
        ):
            raise ConfigError(
                "config.json: quantization_config must be absent; pre-quantized checkpoints "
                "of other tools are not read, use the unquantized model"
            )
        for key in ("partial_rotary_factor", "rotary_pct"):
            value = self._hf.get(key, self._rope.get(key, 1.0))
            if value != 1.0:
                raise ConfigError(f"config.json: {key} must be 1; got {value!r}")

    def refuse_window(self) -> None:
        window = self._hf.get("sliding_window")
        if window is not None and self._hf.get("use_sliding_window", True):
            raise ConfigError(f"config.json: sliding_window must be absent or off; got {window!r}")
