"""config.json is read in full or refused by key."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import Experts, ModelConfig, RopeScaling
from jaxinfer.models.registry import model_config
from tests.models.tiny_decoder import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
)
from tests.tiny import tiny_config

POSITIVE = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
]


def read(**changes: Any) -> ModelConfig:
    return model_config(tiny_config(**changes))


def without(*keys: str, **changes: Any) -> ModelConfig:
    return model_config({k: v for k, v in tiny_config(**changes).items() if k not in keys})


def test_every_key_is_read():
    assert read(rope_theta=5e5, rms_norm_eps=1e-6, tie_word_embeddings=False) == ModelConfig(
        vocab_size=tiny_config()["vocab_size"],
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=640,
        rms_norm_eps=1e-6,
        rope_theta=5e5,
        tie_word_embeddings=False,
    )


def test_absent_keys_have_hugging_faces_defaults():
    config = without(
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"
    )
    assert config.num_key_value_heads == 6
    assert config.head_dim == 48 // 6
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10000.0
    assert config.tie_word_embeddings is False


def test_an_explicit_head_dim_wins_over_the_quotient():
    assert read(head_dim=32).head_dim == 32
    assert read(head_dim=None).head_dim == 8


def test_kv_elements_count_keys_and_values_of_all_layers():
    assert read().kv_elements_per_token == 2 * 2 * 2 * 16


@pytest.mark.parametrize("key", POSITIVE)
def test_an_absent_size_is_refused(key: str):
    with pytest.raises(ConfigError, match=f"{key} must be a positive integer; got None"):
        without(key)


@pytest.mark.parametrize("value", [0, -3, 2.5, "8", True])
@pytest.mark.parametrize("key", [*POSITIVE, "num_key_value_heads", "head_dim"])
def test_a_size_that_is_no_positive_integer_is_refused(key: str, value: Any):
    with pytest.raises(ConfigError, match=f"{key} must be a positive integer; got {value!r}"):
        read(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, r"num_attention_heads \(6\) must be a multiple.*\(4\)"),
        ({"head_dim": 15}, "head_dim must be even for RoPE; got 15"),
        (
            {"hidden_act": "gelu"},
            "hidden_act must be one of silu, swish, gelu_pytorch_tanh; got 'gelu'",
        ),
        ({"sliding_window": 4096}, "sliding_window must be absent or off; got 4096"),
        (
            {"sliding_window": 4096, "use_sliding_window": True},
            "sliding_window must be absent or off; got 4096",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1; got 0.5"),
        ({"rotary_pct": 0.25}, "rotary_pct must be 1; got 0.25"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1; got 0.5",
        ),
        ({"rope_theta": 0}, "rope_theta must be a positive number; got 0"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number; got inf"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number; got 'big'"),
    ],
)
def test_what_would_change_the_arithmetic_unseen_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "swish"},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "jaxinfer"}},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_what_changes_nothing_is_accepted(changes: dict[str, Any]):
    assert read(**changes) == read()


def test_llamas_attention_bias_is_on_all_four_projections():
    config = read(attention_bias=True)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, False)


@pytest.mark.parametrize("says", [{}, {"attention_bias": True}, {"attention_bias": False}])
def test_qwen2_has_a_bias_on_q_k_and_v_whatever_it_says(says: dict[str, bool]):
    config = read(**QWEN2, **says)
    assert (config.qkv_bias, config.out_bias) == (True, False)


def test_mlp_bias_is_its_own():
    config = read(mlp_bias=True)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (False, False, True)


def test_all_layers_of_mistral_see_a_window_if_the_file_has_one():
    assert read(**MISTRAL, sliding_window=None).layer_kinds == ()
    config = read(**MISTRAL, sliding_window=1024)
    assert types_of(config) == (SLIDING, SLIDING)
    assert config.window_of(SLIDING) == 1024
    with pytest.raises(ConfigError, match="sliding_window must be a positive integer; got 0"):
        read(**MISTRAL, sliding_window=0)


@pytest.mark.parametrize("family", [QWEN2, QWEN3])
def test_qwens_later_layers_see_a_window_if_the_file_turns_it_on(family: dict[str, Any]):
    says: dict[str, Any] = {"sliding_window": 32, "max_window_layers": 1, "num_hidden_layers": 3}
    assert read(**family, **says).layer_kinds == ()
    assert types_of(read(**family, **says, use_sliding_window=True)) == (FULL, SLIDING, SLIDING)
    says["max_window_layers"] = 0
    assert types_of(read(**family, **says, use_sliding_window=True)) == (SLIDING,) * 3


def test_smollm3_does_not_turn_every_fourth_layer_or_those_that_it_names():
    ropes = [kind.has_rope for kind in read(**SMOLLM3, num_hidden_layers=5).layer_kinds]
    assert ropes == [True, True, True, False, True]
    named = read(**SMOLLM3, num_hidden_layers=3, no_rope_layers=[0, 1, 0])
    assert [kind.has_rope for kind in named.layer_kinds] == [False, True, False]
    with pytest.raises(ConfigError, match="no_rope_layers must be 0 or 1 for each of 2 layers"):
        read(**SMOLLM3, no_rope_layers=[1])


def test_smollm3s_window_is_of_the_layers_without_rope():
    says: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 8}
    assert types_of(read(**SMOLLM3, **says)) == (FULL,) * 4
    with_windows = read(**SMOLLM3, **says, use_sliding_window=True)
    assert types_of(with_windows) == (FULL, FULL, FULL, SLIDING)


def test_granites_multipliers_are_1_where_it_has_none():
    plain = read(**GRANITE)
    assert (plain.attention_scale, plain.logits_scaling, plain.residual_multiplier) == (1, 1, 1)
    assert read(**GRANITE, attention_multiplier=0.0625).attention_scale == 0.0625
    with pytest.raises(ConfigError, match="logits_scaling must be a positive number; got 0"):
        read(**GRANITE, logits_scaling=0)


def test_gemma2_alternates_and_caps():
    config = read(**GEMMA2, num_hidden_layers=3, hidden_act=None)
    assert types_of(config) == (SLIDING, FULL, SLIDING)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    assert config.norm_adds_one
    assert config.hidden_act == "gelu_tanh"


def test_rope_parameters_are_transformers_5s_form():
    parameters = {"rope_type": "default", "rope_theta": 250000.0}
    config = without("rope_theta", rope_parameters=parameters)
    assert config.rope_theta == 250000.0
    assert config.rope_scaling is None
    parameters |= {"rope_type": "linear", "factor": 3.0}
    config = without("rope_theta", rope_parameters=parameters)
    assert config.rope_theta == 250000.0
    assert config.rope_scaling == RopeScaling("linear", 3.0)


# Gemma 3

GEMMA = {k: v for k, v in GEMMA3.items() if k not in ("sliding_window_pattern", "hidden_act")}
SIZES = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 7}
FULL, SLIDING = "full_attention", "sliding_attention"


def types_of(config: ModelConfig) -> tuple[str, ...]:
    return tuple(kind.attention for kind in config.layer_kinds)


def test_gemma3_is_read_in_its_old_form():
    config = without("tie_word_embeddings", "rms_norm_eps", **GEMMA3)
    assert types_of(config) == (SLIDING, SLIDING, FULL, SLIDING)
    assert [config.window_of(kind) for kind in (SLIDING, FULL)] == [6, None]
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 500.0)
    assert config.attention_scale == 24**-0.5
    assert config.hidden_act == "gelu_tanh"
    assert config.tie_word_embeddings is True


def test_gemma3s_rope_parameters_by_layer_type_are_transformers_5s_form():
    parameters = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        SLIDING: {"rope_type": "default", "rope_theta": 300.0},
    }
    types = [FULL, SLIDING, FULL, FULL]
    gone = ("rope_theta", "rope_local_base_freq", "hidden_act")
    config = without(*gone, **GEMMA, layer_types=types, rope_parameters=parameters)
    assert types_of(config) == tuple(types)
    assert (config.rope_theta, config.rope_local_base_freq) == (2e6, 300.0)
    assert config.rope_scaling == RopeScaling("linear", 8.0)


def test_gemma3s_absent_keys_have_transformers_defaults():
    config = model_config({"architectures": ["Gemma3ForCausalLM"]} | SIZES)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.sliding_window, config.attention_scale) == (4096, 256**-0.5)
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 1e4)
    assert types_of(config) == (*[SLIDING] * 5, FULL, SLIDING)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping must be absent or off; got 30.0",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be absent"),
        ({"layer_types": [FULL]}, "layer_types must name each of 4 layers; got 1"),
        ({"layer_types": ["chunked"] * 4}, "layer_types must be of"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer; got 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a positive number; got -1"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must have one"),
        (
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}},
            "rope_type of sliding_attention must be default; got 'linear'",
        ),
    ],
)
def test_gemma3_with_what_is_not_supported_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(**GEMMA3 | changes)


def test_mixtures_say_what_their_experts_are():
    mixtral = read(**MIXTRAL).experts
    assert mixtral == Experts(5, 2, 24, normalizes=True)
    qwen2 = read(**QWEN2_MOE | {"mlp_only_layers": [1]})
    assert qwen2.experts == Experts(6, 3, 24, normalizes=False, shared_intermediate_size=40)
    assert [kind.is_sparse for kind in qwen2.layer_kinds] == [True, False]
    assert (qwen2.qkv_bias, qwen2.mlp_sizes) == (True, (80, 24, 40))
    every_other = read(**QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 5})
    assert [kind.is_sparse for kind in every_other.layer_kinds] == [False, True] * 2 + [False]
    assert read(**OLMOE).mlp_sizes == (24,)


@pytest.mark.parametrize("family", [MIXTRAL, QWEN3_MOE])
def test_the_number_of_experts_has_two_names(family: dict[str, Any]):
    gone = {"num_experts": None, "num_local_experts": None}
    for name in gone:
        found = read(**family | gone | {name: 11}).experts
        assert found is not None
        assert found.count == 11


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 10}, r"at most num_experts \(9\); got 10"),
        (MIXTRAL, {"num_experts_per_tok": 6}, r"at most num_local_experts \(5\); got 6"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts must be a positive integer; got 0"),
        (QWEN2_MOE, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false; got 1"),
        (QWEN2_MOE, {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers; got 3"),
        (QWEN2_MOE, {"moe_intermediate_size": "x"}, "moe_intermediate_size must be a positive"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv must be absent or off; got 8.0"),
    ],
)
def test_a_mixture_that_is_none_is_refused(
    family: dict[str, Any], changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        read(**family | changes)
