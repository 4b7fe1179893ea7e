"""Tiny models of each family whose logits tests/data/architectures.json records: plain data and
weights from a seed.

Odd sizes, more than one layer of each kind, windows shorter than the text.
"""

from typing import Any

import numpy as np

from bench.tiny_model import tiny_config, tiny_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 42,
    "intermediate_size": 74,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}


def _family(model_type: str, model_class: str, **changes: Any) -> dict[str, Any]:
    return SIZES | {"model_type": model_type, "architectures": [model_class]} | changes


def _longrope(num_pairs: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1 + 0.05 * i for i in range(num_pairs)],
        "long_factor": [1 + 3.0 * i for i in range(num_pairs)],
    }


PHI3_HEADS: dict[str, Any] = {"hidden_size": 96, "head_dim": 16}

CASES: dict[str, dict[str, Any]] = {
    "llama, llama3 rope, biases": _family(
        "llama",
        "LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "llama, linear rope": _family(
        "llama", "LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "llama, dynamic rope": _family(
        "llama",
        "LlamaForCausalLM",
        max_position_embeddings=200,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    ),
    "mistral, window": _family("mistral", "MistralForCausalLM", sliding_window=17),
    "qwen2, windows": _family(
        "qwen2",
        "Qwen2ForCausalLM",
        head_dim=8,
        hidden_size=48,
        use_sliding_window=True,
        sliding_window=33,
        max_window_layers=2,
    ),
    "qwen3, windows": _family(
        "qwen3",
        "Qwen3ForCausalLM",
        use_sliding_window=True,
        sliding_window=33,
        max_window_layers=3,
        rope_theta=1e6,
    ),
    "qwen3, yarn": _family(
        "qwen3",
        "Qwen3ForCausalLM",
        max_position_embeddings=64,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
        },
    ),
    "smollm3": _family(
        "smollm3",
        "SmolLM3ForCausalLM",
        head_dim=8,
        hidden_size=48,
        rope_theta=5e6,
        no_rope_layers=[1, 0, 1, 1, 0],
    ),
    "granite": _family(
        "granite",
        "GraniteForCausalLM",
        head_dim=8,
        hidden_size=48,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
        logits_scaling=0.5,
    ),
    "olmo2": _family(
        "olmo2", "Olmo2ForCausalLM", head_dim=8, hidden_size=48, tie_word_embeddings=False
    ),
    "gemma2": _family(
        "gemma2",
        "Gemma2ForCausalLM",
        sliding_window=17,
        query_pre_attn_scalar=14,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "mixtral, window": _family(
        "mixtral",
        "MixtralForCausalLM",
        head_dim=8,
        hidden_size=48,
        intermediate_size=26,
        sliding_window=17,
        num_hidden_layers=3,
        num_local_experts=5,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    ),
    "qwen2_moe, dense layers between": _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        head_dim=8,
        hidden_size=48,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=34,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "qwen3_moe": _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        num_hidden_layers=3,
        num_experts=9,
        num_experts_per_tok=4,
        moe_intermediate_size=18,
        norm_topk_prob=True,
    ),
    "olmoe": _family(
        "olmoe",
        "OlmoeForCausalLM",
        head_dim=8,
        hidden_size=48,
        intermediate_size=22,
        num_hidden_layers=3,
        num_experts=7,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        tie_word_embeddings=False,
    ),
    "phi3, longrope of short texts, a part turns, window": _family(
        "phi3",
        "Phi3ForCausalLM",
        **PHI3_HEADS,
        tie_word_embeddings=False,
        sliding_window=33,
        original_max_position_embeddings=200,
        partial_rotary_factor=0.75,
        rope_scaling=_longrope(6),
    ),
    "phi3, longrope of long texts": _family(
        "phi3",
        "Phi3ForCausalLM",
        **PHI3_HEADS,
        original_max_position_embeddings=199,
        rope_scaling=_longrope(8),
    ),
}
NUM_TOKENS = 200
SHOWN = (0, 1, 16, 17, 33, 127, 198, 199)
"""Positions whose logits are recorded."""


def config_of(case: str) -> dict[str, Any]:
    """config.json."""
    return tiny_config(**CASES[case])


def tensors_of(case: str) -> dict[str, np.ndarray]:
    return tiny_tensors(config_of(case), seed=1)


def token_ids(case: str) -> list[int]:
    rng = np.random.default_rng(2)
    return rng.integers(0, CASES[case]["vocab_size"], NUM_TOKENS).tolist()
