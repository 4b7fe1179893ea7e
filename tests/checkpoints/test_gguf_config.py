"""GGUF metadata as Hugging Face config keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.gguf_config import hf_config, llama3_divisors

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
        ({"llama.expert_count": 8}, "no mixture of experts"),
        ({"split.count": 3}, "part of a split of 3"),
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


# Rotary scaling


def test_linear_scaling_is_carried_over_from_both_keys():
    expected = {"rope_type": "linear", "factor": 4.0}
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert hf_config(PATH, METADATA | new, SHAPES)["rope_scaling"] == expected
    old = {"llama.rope.scale_linear": 4.0}
    assert hf_config(PATH, METADATA | old, SHAPES)["rope_scaling"] == expected
    none = {"llama.rope.scaling.type": "none"}
    assert hf_config(PATH, METADATA | none, SHAPES)["rope_scaling"] is None


def test_another_scaling_keeps_its_name_for_the_model_to_judge():
    metadata = METADATA | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    assert hf_config(PATH, metadata, SHAPES)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
    }


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
        hf_config(PATH, METADATA, SHAPES, rope_factors=np.linspace(1, 8, 8))
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight'"):
        hf_config(PATH, METADATA, SHAPES, rope_factors=np.full(3, 8.0))


def test_divisors_of_one_mean_no_scaling():
    config = hf_config(PATH, METADATA, SHAPES, rope_factors=np.ones(8, np.float32))
    assert config["rope_scaling"] is None
