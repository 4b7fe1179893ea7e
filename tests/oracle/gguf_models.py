"""Tiny models of each architecture that tests/data/gguf/ has as llama.cpp's converter wrote them:
their config.json, and weights from a seed under the names that models here have.

Odd sizes, more than one layer of each kind. All values are a few bits wide: bfloat16 holds them,
and float32 Gemma's norms plus one, without rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA: dict[str, Any] = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 17,
    "head_dim": 6,
    "query_pre_attn_scalar": 6,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [1.0, 2.5, 20.125],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _family(model_type: str, model_class: str, **changes: Any) -> dict[str, Any]:
    return SIZES | {"model_type": model_type, "architectures": [model_class]} | changes


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _family(
        "llama",
        "LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_scaling=LLAMA3,
        rope_theta=500_000.0,
        head_dim=16,
    ),
    "llama-fused-linear": _family(
        "llama",
        "LlamaForCausalLM",
        attention_bias=True,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    ),
    "mistral": _family("mistral", "MistralForCausalLM", head_dim=6, tie_word_embeddings=False),
    "mixtral": _family(
        "mixtral",
        "MixtralForCausalLM",
        num_local_experts=3,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    ),
    "qwen2": _family("qwen2", "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=64),
    "qwen3-yarn": _family("qwen3", "Qwen3ForCausalLM", head_dim=6, rope_scaling=YARN),
    "gemma2": _family(
        "gemma2",
        "Gemma2ForCausalLM",
        **GEMMA | {"num_hidden_layers": 3, "rope_theta": 10_000.0},
        attn_logit_softcapping=30.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": _family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        **GEMMA | {"num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1},
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_local_base_freq=5_000.0,
        sliding_window_pattern=6,
    ),
    "phi3-longrope": _family(
        "phi3",
        "Phi3ForCausalLM",
        original_max_position_embeddings=64,
        hidden_size=32,
        partial_rotary_factor=0.75,
        rope_scaling=LONGROPE,
        sliding_window=None,
    ),
    "phi3": _family(
        "phi3",
        "Phi3ForCausalLM",
        original_max_position_embeddings=512,
        sliding_window=33,
        tie_word_embeddings=False,
    ),
    "smollm3": _family("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=5),
    "olmo2": _family("olmo2", "Olmo2ForCausalLM", tie_word_embeddings=False),
    "granite": _family(
        "granite",
        "GraniteForCausalLM",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=8.0,
    ),
    "qwen2moe": _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        **EXPERTS,
        shared_expert_intermediate_size=14,
        norm_topk_prob=False,
        tie_word_embeddings=False,
    ),
    "qwen3moe": _family(
        "qwen3_moe", "Qwen3MoeForCausalLM", **EXPERTS, head_dim=6, norm_topk_prob=True
    ),
    "olmoe": _family(
        "olmoe",
        "OlmoeForCausalLM",
        num_experts=3,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
}
"""By the name of the file; where `fused` is in it, the converter was asked to fuse q, k and v."""

PRE_NORMS = ("input", "post_attention")
POST_NORMS = ("post_attention", "post_feedforward")
NORMS = {
    "olmo2": POST_NORMS,
    "gemma2": (*PRE_NORMS, "pre_feedforward", "post_feedforward"),
    "gemma3_text": (*PRE_NORMS, "pre_feedforward", "post_feedforward"),
}
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
WHOLE_NORMS = ("olmo2", "olmoe")
QKV_BIASES = ("qwen2", "qwen2_moe")
Shapes = dict[str, tuple[int, ...]]


def head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def shapes(config: dict[str, Any]) -> Shapes:
    """Of every tensor, under the names that models here have."""
    vocab, dim = config["vocab_size"], config["hidden_size"]
    found: Shapes = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, dim)
    for i in range(config["num_hidden_layers"]):
        parts = _attention(config) | _mlp(config)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    return found


def _attention(config: dict[str, Any]) -> Shapes:
    dim, size, family = config["hidden_size"], head_dim(config), config["model_type"]
    q, kv = (config[f"num_{key}_heads"] * size for key in ("attention", "key_value"))
    products = {"q": (q, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, q)}
    found: Shapes = {f"self_attn.{x}_proj.weight": shape for x, shape in products.items()}
    biased = "qkvo" if config.get("attention_bias") else "qkv" if family in QKV_BIASES else ""
    found |= {f"self_attn.{x}_proj.bias": products[x][:1] for x in biased}
    found |= {f"{x}_layernorm.weight": (dim,) for x in NORMS.get(family, PRE_NORMS)}
    if family in HEAD_NORMS:
        found |= {f"self_attn.{x}_norm.weight": (size,) for x in "qk"}
    if family in WHOLE_NORMS:
        found |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    return found


def _mlp(config: dict[str, Any]) -> Shapes:
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    count = config.get("num_experts") or config.get("num_local_experts")
    if count is None:
        found = _gated("mlp", dim, ffn)
        if config.get("mlp_bias"):
            found |= {name.replace("weight", "bias"): shape[:1] for name, shape in found.items()}
        return found
    of_expert = config.get("moe_intermediate_size", ffn)
    found = {"mlp.gate.weight": (count, dim)}
    found |= {
        name: (count * rows, columns)
        for name, (rows, columns) in _gated("mlp.experts", dim, of_expert).items()
    }
    if shared := config.get("shared_expert_intermediate_size"):
        found |= _gated("mlp.shared_expert", dim, shared)
        found["mlp.shared_expert_gate.weight"] = (1, dim)
    return found


def _gated(name: str, dim: int, ffn: int) -> Shapes:
    sizes = {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}
    return {f"{name}.{x}_proj.weight": shape for x, shape in sizes.items()}


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32, in 64ths from -2 to 2."""
    rng = np.random.default_rng(5)
    return {
        name: rng.integers(-128, 129, shape).astype(np.float32) / 64
        for name, shape in shapes(config).items()
    }
