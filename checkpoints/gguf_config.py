"""GGUF metadata as Hugging Face config keys, and the tensor names of each architecture.

One `Architecture` per value of general.architecture; another family is one more entry of the table.
Knows no tensor data but the rotary factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_PARTS = _LAYER_PARTS | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLOBAL_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one general.architecture maps to Hugging Face's names."""

    name: str  # general.architecture, and the prefix of its metadata keys
    model_class: str
    model_type: str
    is_permuted: bool = False  # rows of q and k are stored for the interleaved rotary form
    norms_hold_one: bool = False  # stored as 1 + weight
    layer_parts: Mapping[str, str] = field(default_factory=lambda: _LAYER_PARTS)

    def hf_name(self, name: str) -> str:
        """Hugging Face's tensor name; a name unknown here stays, so that the loader reports it."""
        layer = _LAYER_NAME.fullmatch(name)
        if layer and layer[2] in self.layer_parts:
            return f"model.layers.{layer[1]}.{self.layer_parts[layer[2]]}.{layer[3]}"
        part, _, kind = name.rpartition(".")
        if part in _GLOBAL_PARTS and kind in ("weight", "bias"):
            return f"{_GLOBAL_PARTS[part]}.{kind}"
        return name

    def permuted_heads(self, name: str, config: Mapping[str, Any]) -> int | None:
        """Heads whose rows must be put back in order, or None if the rows are as they should be."""
        layer = _LAYER_NAME.fullmatch(name)
        if not self.is_permuted or not layer:
            return None
        key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(layer[2])
        return None if key is None else config[key]

    def is_offset(self, name: str) -> bool:
        """Whether the file holds 1 + the weight."""
        return self.norms_hold_one and name.endswith("norm.weight")


ARCHITECTURES = (
    Architecture("llama", "LlamaForCausalLM", "llama", is_permuted=True),
    Architecture("qwen2", "Qwen2ForCausalLM", "qwen2"),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        norms_hold_one=True,
        layer_parts=_GEMMA3_PARTS,
    ),
)


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> Architecture:
    """The table's entry for general.architecture. Raises: CheckpointError if there is none."""
    name = metadata.get("general.architecture")
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise CheckpointError(f"{path}: expected general.architecture to be {known}, found {name!r}")


def hf_config(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Shapes,
    *,
    rope_factors: np.ndarray | None = None,
) -> dict[str, Any]:
    """Hugging Face's config keys for the file.

    Args:
        shapes: of all tensors, under their GGUF names.
        rope_factors: f32[D/2], what each rotary frequency is divided by (llama3 scaling), or None.
    Raises: CheckpointError for missing or impossible metadata, and for what no config key can say.
    """
    fields = _Fields(path, metadata, architecture_of(path, metadata).name)
    architecture = architecture_of(path, metadata)
    _refuse_unsupported(fields)
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path}: expected a tensor 'token_embd.weight', found none")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    _check_head_dim(fields, head_dim)
    rope_theta = fields.number("rope.freq_base", 10000.0)
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(fields, rope_factors, rope_theta, head_dim),
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }
    if architecture.model_type == "gemma3_text":
        config |= _gemma3_keys(fields, config)
    else:
        config["hidden_act"] = "silu"
    for key in ("bos_token_id", "eos_token_id"):
        config[key] = token_id(metadata, f"tokenizer.ggml.{key}")
    return config


def _gemma3_keys(fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has: of 62 layers (27B) q is scaled by the width per head, else by its own.

    The pattern of windows and the base of sliding layers are not in the files before 2026.
    """
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.integer("attention.sliding_window"),
        "sliding_window_pattern": fields.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": (
            per_head if config["num_hidden_layers"] == 62 else config["head_dim"]
        ),
    }


def token_id(metadata: Mapping[str, Any], key: str) -> int | None:
    """An id out of the metadata; None where it is absent or not an id."""
    value = metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        return None
    return value


@dataclass(frozen=True, slots=True)
class _Fields:
    """The metadata of one architecture; every error names file and key."""

    path: Path
    metadata: Mapping[str, Any]
    prefix: str

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, at most 2**31."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 2**31:
            raise self.error(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "a positive number", value)
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    def error(self, key: str, expected: str, found: Any) -> CheckpointError:
        shown = "none" if found is None else f"{found!r:.60}"
        return CheckpointError(
            f"{self.path}: expected metadata '{self.prefix}.{key}' to be {expected}, found {shown}"
        )


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.get("expert_count"):
        raise fields.error(
            "expert_count", "absent (no mixture of experts)", fields.get("expert_count")
        )
    if fields.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{fields.path}: expected one whole file, found part of a split "
            f"of {fields.metadata['split.count']}; merge the parts first"
        )


def _check_head_dim(fields: _Fields, head_dim: int) -> None:
    for key in ("rope.dimension_count", "attention.value_length"):
        value = fields.integer(key, head_dim)
        if value != head_dim:
            raise fields.error(key, f"the head size {head_dim}", value)


def _rope_scaling(
    fields: _Fields, factors: np.ndarray | None, rope_theta: float, head_dim: int
) -> dict[str, Any] | None:
    if factors is not None and not np.all(factors == 1.0):
        return _llama3_scaling(fields.path, factors, rope_theta, head_dim)
    kind = fields.get("rope.scaling.type")
    if kind is None and fields.get("rope.scale_linear") is not None:  # the key before 2024
        kind, key = "linear", "rope.scale_linear"
    else:
        key = "rope.scaling.factor"
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number(key)}
    if fields.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = fields.integer(
            "rope.scaling.original_context_length"
        )
    return scaling


def _llama3_scaling(
    path: Path, factors: np.ndarray, rope_theta: float, head_dim: int
) -> dict[str, Any]:
    """The llama3 parameters behind the stored divisors.

    The file keeps only the divisors, and every published llama3 model has the same three other
    parameters: those are assumed, and the divisors that follow from them compared with the file's.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(scaling, rope_theta, head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{path}: expected 'rope_freqs.weight' to be llama3 scaling of 8192 positions with "
            f"frequency factors 1 and 4, found other values"
        )
    return scaling


def llama3_divisors(scaling: Mapping[str, Any], rope_theta: float, head_dim: int) -> np.ndarray:
    """f64[D/2]: what llama3 scaling divides each rotary frequency by (Llama 3.1's formula)."""
    frequencies = rope_theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
