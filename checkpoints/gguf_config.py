"""GGUF metadata as Hugging Face config keys.

What files leave out, because llama.cpp knows it of the architecture, is said here. Knows no tensor
data but the rotary factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf_fields import Fields
from checkpoints.gguf_names import architecture_of
from checkpoints.gguf_rope import rope_scaling

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]

MAX_LAYERS = 1 << 14
FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' words for kinds of layers


def hf_config(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Shapes,
    *,
    rope_tensors: Mapping[str, np.ndarray] | None = None,
) -> Config:
    """Hugging Face's config keys for the file.

    Args:
        shapes: of all tensors, under their GGUF names.
        rope_tensors: f32[D/2], those of gguf_rope.ROPE_TENSORS that the file has.
    Raises: CheckpointError for missing or impossible metadata, and for what no config key can say.
    """
    architecture = architecture_of(path, metadata)
    fields = Fields(path, metadata, architecture.name)
    config = _common_keys(fields, shapes)
    config |= {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
    }
    theta, head_dim = config["rope_theta"], config["head_dim"]
    config["rope_scaling"] = rope_scaling(fields, rope_tensors or {}, theta, head_dim)
    config |= OWN_KEYS.get(architecture.name, _no_keys)(fields, config)
    if "hidden_activation" not in config:
        config["hidden_act"] = "silu"
    if "partial_rotary_factor" not in config:
        _check_head_dim(fields, head_dim, "rope.dimension_count")
    fields.refuse_unread()
    for key in ("bos_token_id", "eos_token_id"):
        config[key] = token_id(metadata, f"tokenizer.ggml.{key}")
    return config


def _common_keys(fields: Fields, shapes: Shapes) -> Config:
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{fields.path}: expected a tensor 'token_embd.weight', found none")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if not head_dim:
        raise fields.error("attention.head_count", f"at most {hidden_size}", num_heads)
    _check_head_dim(fields, head_dim, "attention.value_length")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count", most=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }


def _check_head_dim(fields: Fields, head_dim: int, key: str) -> None:
    value = fields.integer(key, head_dim)
    if value != head_dim:
        raise fields.error(key, f"the head size {head_dim}", value)


def token_id(metadata: Mapping[str, Any], key: str) -> int | None:
    """An id out of the metadata; None where it is absent or not an id."""
    value = metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        return None
    return value


def _no_keys(fields: Fields, config: Config) -> Config:
    return {}


def _llama_keys(fields: Fields, config: Config) -> Config:
    """Mistral and Mixtral are llama too; a window, which converters leave out, is Mistral's."""
    keys: Config = {}
    if window := fields.whole("attention.sliding_window"):
        keys = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        keys["sliding_window"] = window
    if fields.whole("expert_count"):
        keys |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        keys |= _expert_keys(fields, "num_local_experts")
    return keys


def _gemma2_keys(fields: Fields, config: Config) -> Config:
    """The first files have neither caps nor a window."""
    window = fields.integer("attention.sliding_window", 4096)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, num_layers=46),
        "sliding_window": window,
        "layer_types": _layer_types(fields, config, every=2),
    }


def _gemma3_keys(fields: Fields, config: Config) -> Config:
    """The pattern of windows and the base of sliding layers are not in the files before 2026;
    without a window all layers see all.
    """
    window, count = fields.whole("attention.sliding_window"), config["num_hidden_layers"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": fields.optional("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(config, num_layers=62),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window or None,
        "layer_types": _layer_types(fields, config, every=6) if window else [FULL] * count,
    }


def _query_scalar(config: Config, *, num_layers: int) -> int:
    """Of a Gemma of 27B, told by its layers, q is scaled by the width per head, else by its own."""
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return per_head if config["num_hidden_layers"] == num_layers else config["head_dim"]


def _layer_types(fields: Fields, config: Config, *, every: int) -> list[str]:
    """Each `every`th layer sees all, where the file does not say; 0: none does."""
    key, count = "attention.sliding_window_pattern", config["num_hidden_layers"]
    pattern = fields.get(key)
    if isinstance(pattern, np.ndarray):
        if pattern.shape != (count,):
            raise fields.error(key, f"true or false for each of {count} layers", len(pattern))
        return [SLIDING if has_window else FULL for has_window in pattern.tolist()]
    every = fields.whole(key, every)
    return [SLIDING if not every or (i + 1) % every else FULL for i in range(count)]


def _phi3_keys(fields: Fields, config: Config) -> Config:
    """The first files lack the window, which those of 4096 positions have; 0 stands for none."""
    most, head_dim = config["max_position_embeddings"], config["head_dim"]
    window = fields.whole("attention.sliding_window", 2047 if most == 4096 else 0)
    original = fields.integer("rope.scaling.original_context_length", most)
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": fields.integer("rope.dimension_count", head_dim) / head_dim,
    }


def _smollm3_keys(fields: Fields, config: Config) -> Config:
    return {"no_rope_layer_interval": 4}


def _granite_keys(fields: Fields, config: Config) -> Config:
    if not fields.flag("rope.scaling.finetuned", True):
        raise fields.error("rope.scaling.finetuned", "absent or true (layers with RoPE)", False)
    return {
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _qwen_moe_keys(fields: Fields, config: Config, *, normalizes: bool) -> Config:
    keys = _expert_keys(fields, "num_experts")
    of_expert = config["intermediate_size"] // keys["num_experts_per_tok"]
    return keys | {
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", of_expert),
        "norm_topk_prob": fields.flag("expert_weights_norm", normalizes),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe_keys(fields: Fields, config: Config) -> Config:
    key, whole = "expert_shared_feed_forward_length", config["intermediate_size"]
    return _qwen_moe_keys(fields, config, normalizes=False) | {
        "shared_expert_intermediate_size": fields.integer(key, whole)
    }


def _qwen3moe_keys(fields: Fields, config: Config) -> Config:
    return _qwen_moe_keys(fields, config, normalizes=True)


def _olmoe_keys(fields: Fields, config: Config) -> Config:
    normalizes = fields.flag("expert_weights_norm", False)
    return _expert_keys(fields, "num_experts") | {"norm_topk_prob": normalizes}


def _expert_keys(fields: Fields, count: str) -> Config:
    num_experts = fields.integer("expert_count")
    return {
        count: num_experts,
        "num_experts_per_tok": fields.integer("expert_used_count", most=num_experts),
    }


OWN_KEYS: dict[str, Callable[[Fields, Config], Config]] = {
    "llama": _llama_keys,
    "gemma2": _gemma2_keys,
    "gemma3": _gemma3_keys,
    "phi3": _phi3_keys,
    "smollm3": _smollm3_keys,
    "granite": _granite_keys,
    "qwen2moe": _qwen2moe_keys,
    "qwen3moe": _qwen3moe_keys,
    "olmoe": _olmoe_keys,
}
"""By general.architecture; they win over those that all have in common."""
