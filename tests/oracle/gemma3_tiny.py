"""Tiny Gemma 3 models whose logits the golden file records: plain data, weights from a seed."""

from typing import Any

import numpy as np

from bench.tiny_model import tiny_config, tiny_tensors

PLAIN: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 42,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 17,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 14,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
}
CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "scaled, biased, one key head": PLAIN
    | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "attention_bias": True,
        "num_key_value_heads": 1,
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
        "sliding_window": 64,
    },
}
NUM_TOKENS = 700
SHOWN = (0, 1, 15, 16, 17, 18, 63, 64, 65, 127, 128, 699)
"""Positions whose logits are recorded."""


def config_of(case: str) -> dict[str, Any]:
    """config.json."""
    return tiny_config(**CASES[case])


def tensors_of(case: str) -> dict[str, np.ndarray]:
    return tiny_tensors(config_of(case), seed=1)


def token_ids(case: str) -> list[int]:
    rng = np.random.default_rng(2)
    return rng.integers(0, CASES[case]["vocab_size"], NUM_TOKENS).tolist()
