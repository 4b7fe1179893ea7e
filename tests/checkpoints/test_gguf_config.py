"""GGUF metadata as Hugging Face config keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.gguf_config import FULL, SLIDING, hf_config
from checkpoints.gguf_rope import DIVISORS, LONG, SHORT, llama3_divisors

PATH = Path("m.gguf")
SHAPES = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_config_of_a_file_is_the_one_it_was_converted_from(tmp_path, tiny, family, tied):
    model = tiny.model(family, tied=tied)
    path = tiny.gguf(tmp_path / "m.gguf", model, tiny.vocabulary(tiny.byte_level(), "smollm"))
    config = GGUFSource(path).config
    assert {key: config[key] for key in model.config} == model.config


def test_a_bias_in_the_file_is_in_the_config(tmp_path: Path, tiny):
    assert GGUFSource(tiny.gguf(tmp_path / "q.gguf", tiny.model("qwen2"))).config["attention_bias"]
    assert not GGUFSource(tiny.gguf(tmp_path / "l.gguf", tiny.model())).config["attention_bias"]


def test_absent_optional_metadata_has_the_formats_defaults():
    metadata = {k: v for k, v in METADATA.items() if "head_count_kv" not in k}
    config = hf_config(PATH, metadata, SHAPES)
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None
    assert config["bos_token_id"] is None


def test_an_explicit_head_size_wins_over_the_quotient():
    metadata = METADATA | {
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
    }
    assert hf_config(PATH, metadata, SHAPES)["head_dim"] == 32


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
    ],
)
@pytest.mark.parametrize("value", [None, 0, -1, 1 << 40, 1.5, True, "12", np.array([4, 4])])
def test_a_missing_or_impossible_number_is_named(key: str, value):
    with pytest.raises(CheckpointError, match=rf"m\.gguf: expected metadata 'llama\.{key}' to be"):
        hf_config(PATH, METADATA | {f"llama.{key}": value}, SHAPES)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1e-5, "x", None])
def test_an_impossible_epsilon_is_named(value):
    key = "llama.attention.layer_norm_rms_epsilon"
    with pytest.raises(CheckpointError, match=key):
        hf_config(PATH, METADATA | {key: value}, SHAPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.attention.head_count": 65}, "'llama.attention.head_count' to be at most 64"),
        ({"llama.rope.freq_base": 1e300}, "'llama.rope.freq_base' to be a positive number"),
        ({"llama.expert_count": 8}, "'llama.expert_used_count' to be a positive integer"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "at most 8, found 9"),
        ({"llama.attn_logit_softcapping": 50.0}, "to be absent or 0 in llama, found 50.0"),
        ({"llama.attention.causal": False}, "to be absent or True in llama, found False"),
        ({"llama.logit_scale": np.ones(2)}, "'llama.logit_scale' to be absent or 1"),
        ({"llama.rope.scaling.type": "su"}, "one of linear, yarn, longrope, none, found 'su'"),
        ({"llama.rope.scaling.type": "longrope"}, "expected tensors 'rope_factors_short.weight'"),
        ({"llama.rope.dimension_count": 8}, "the head size 16, found 8"),
        ({"llama.attention.value_length": 8}, "the head size 16, found 8"),
    ],
)
def test_what_no_config_key_can_say_is_refused(changes: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        hf_config(PATH, METADATA | changes, SHAPES)


def test_a_file_without_embedding_is_refused():
    with pytest.raises(CheckpointError, match=r"expected a tensor 'token_embd\.weight'"):
        hf_config(PATH, METADATA, {})


# What files leave out

SMALL = {key.removeprefix("llama."): value for key, value in METADATA.items()}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """`changes`: with __ for the dots of a key; None takes it away."""
    said = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{architecture}.{key}": x for key, x in said.items() if x is not None}
    return hf_config(PATH, metadata | {"general.architecture": architecture}, SHAPES)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"context_length": 4096}, 2047),  # before August 2024
        ({"context_length": 131072}, None),
        ({"context_length": 4096, "attention__sliding_window": 0}, None),  # Phi-4
        ({"context_length": 131072, "attention__sliding_window": 262144}, 262144),
    ],
)
def test_the_window_of_phi3(changes: dict, expected: int | None):
    assert config_of("phi3", **changes)["sliding_window"] == expected


def test_a_part_of_phi4_minis_heads_turns():
    assert config_of("phi3", rope__dimension_count=12)["partial_rotary_factor"] == 0.75


def test_the_first_gemma2_files_lack_caps_and_window():
    config = config_of("gemma2")
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (4096, 16)
    assert config["layer_types"] == [SLIDING, FULL]
    assert config_of("gemma2", block_count=46)["query_pre_attn_scalar"] == 64 // 4


def test_llama_with_a_window_is_mistral_and_with_experts_mixtral():
    assert config_of("llama")["architectures"] == ["LlamaForCausalLM"]
    mistral = config_of("llama", attention__sliding_window=32)
    assert (mistral["architectures"], mistral["sliding_window"]) == (["MistralForCausalLM"], 32)
    mixtral = config_of("llama", expert_count=8, expert_used_count=2)
    assert mixtral["architectures"] == ["MixtralForCausalLM"]
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (8, 2)


def test_experts_sizes_follow_from_the_whole_where_a_file_lacks_them():
    config = config_of("qwen2moe", expert_count=8, expert_used_count=4)
    assert (config["moe_intermediate_size"], config["norm_topk_prob"]) == (96 // 4, False)
    assert config["shared_expert_intermediate_size"] == 96
    config = config_of("qwen3moe", expert_count=8, expert_used_count=4, expert_weights_norm=False)
    assert config["norm_topk_prob"] is False


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("olmo2", {"attention__sliding_window": 4096}, "absent or 0 in olmo2, found 4096"),
        ("granite", {"rope__scaling__finetuned": False}, "absent or true"),
        ("granite", {"expert_count": 4}, "absent or 0 in granite, found 4"),
        ("qwen3moe", {}, "'qwen3moe.expert_count' to be a positive integer"),
        ("qwen2moe", {"expert_count": 2, "expert_used_count": np.ones(2)}, "expert_used_count"),
        (
            "qwen3moe",
            {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2},
            "absent or 1 in qwen3moe, found 2",
        ),
        ("gemma3", {"attention__sliding_window": np.ones(2)}, "attention.sliding_window"),
        ("gemma3", {"final_logit_softcapping": "x"}, "final_logit_softcapping"),
        ("gemma2", {"block_count": 1 << 20}, "at most 16384"),
    ],
)
def test_what_no_model_here_can_be_is_refused(architecture: str, changes: dict, message: str):
    with pytest.raises(CheckpointError) as caught:
        config_of(architecture, **changes)
    assert message in str(caught.value)


# Rotary scaling


def test_linear_scaling_is_carried_over_from_both_keys():
    expected = {"rope_type": "linear", "factor": 4.0}
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert hf_config(PATH, METADATA | new, SHAPES)["rope_scaling"] == expected
    old = {"llama.rope.scale_linear": 4.0}
    assert hf_config(PATH, METADATA | old, SHAPES)["rope_scaling"] == expected
    none = {"llama.rope.scaling.type": "none"}
    assert hf_config(PATH, METADATA | none, SHAPES)["rope_scaling"] is None


def test_a_factor_without_a_type_is_linear():
    config = hf_config(PATH, METADATA | {"llama.rope.scaling.factor": 4.0}, SHAPES)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_yarn_has_its_own_keys():
    metadata = METADATA | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.yarn_beta_slow": 2.0,
        "llama.rope.scaling.yarn_attn_factor": 1.5,
        "llama.rope.scaling.yarn_log_multiplier": 0.5,
        "llama.rope.scaling.yarn_ext_factor": 1.0,
    }
    assert hf_config(PATH, metadata, SHAPES)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }


@pytest.mark.parametrize(("attn_factor", "expected"), [(None, {}), (1.0954452, {}), (1.5, 1.5)])
def test_longrope_says_what_it_multiplies_by_where_that_is_not_the_formula(attn_factor, expected):
    metadata = METADATA | {"llama.rope.scaling.original_context_length": 32}
    if attn_factor is not None:
        metadata |= {"llama.rope.scaling.attn_factor": attn_factor}
    metadata["llama.context_length"] = 64  # (1 + ln 2 / ln 32)**0.5 is 1.0954451
    factors = {name: np.full(8, x, np.float32) for name, x in ((SHORT, 1.1), (LONG, 30.0))}
    assert hf_config(PATH, metadata, SHAPES, rope_tensors=factors)["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": [1.1] * 8,
        "long_factor": [30.0] * 8,
        **({"attention_factor": expected} if expected else {}),
    }
    with pytest.raises(CheckpointError, match=r"expected a tensor 'rope_factors_long\.weight'"):
        hf_config(PATH, metadata, SHAPES, rope_tensors={SHORT: factors[SHORT]})


def test_llama3_divisors_follow_the_published_formula():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = llama3_divisors(scaling, 500000.0, 128)
    for i, divisor in enumerate(divisors):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / 128)
        if wavelength < 8192 / 4:
            assert divisor == 1.0
        elif wavelength > 8192:
            assert divisor == 8.0
        else:
            smooth = (8192 / wavelength - 1) / 3
            assert divisor == pytest.approx(1 / ((1 - smooth) / 8 + smooth))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_stored_divisors(tmp_path, tiny, factor: float):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = llama3_divisors(scaling, 500000.0, 16).astype(np.float32)
    model = tiny.model("llama")
    model.config["rope_theta"] = 500000.0
    path = tiny.gguf(
        tmp_path / "m.gguf", model, extra=lambda w: w.add_tensor("rope_freqs.weight", divisors)
    )
    source = GGUFSource(path)
    assert source.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in source.names()


def test_divisors_of_another_kind_are_refused():
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' to be llama3 scaling"):
        hf_config(PATH, METADATA, SHAPES, rope_tensors={DIVISORS: np.linspace(1, 8, 8)})
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight'"):
        hf_config(PATH, METADATA, SHAPES, rope_tensors={DIVISORS: np.full(3, 8.0)})


def test_divisors_of_one_mean_no_scaling():
    config = hf_config(PATH, METADATA, SHAPES, rope_tensors={DIVISORS: np.ones(8, np.float32)})
    assert config["rope_scaling"] is None
