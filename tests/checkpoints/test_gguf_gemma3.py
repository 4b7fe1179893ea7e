"""Gemma 3 in GGUF: names, norms stored as 1 + weight, and what the metadata leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.gguf_config import FULL, SLIDING, hf_config

PATH = Path("m.gguf")
SHAPES = {"token_embd.weight": (320, 64)}
METADATA: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 7,
    "gemma3.context_length": 256,
    "gemma3.embedding_length": 64,
    "gemma3.feed_forward_length": 96,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 2,
    "gemma3.attention.key_length": 32,
    "gemma3.attention.sliding_window": 512,
    "gemma3.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    "gemma3.rope.freq_base": 1e6,
}
VECTORS = {
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
    "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
    "blk.1.attn_q_norm": "model.layers.1.self_attn.q_norm",
    "blk.1.attn_k_norm": "model.layers.1.self_attn.k_norm",
    "output_norm": "model.norm",
}


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in METADATA.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_norms_are_read_without_the_one_that_converters_add(tmp_path: Path):
    weight = np.array([-1, -0.25, 0, 0.5, 300], np.float32)
    q = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    tensors = {f"{name}.weight": weight + 1 for name in VECTORS}
    tensors |= {"token_embd.weight": np.ones((320, 64), np.float32), "blk.0.attn_q.weight": q}
    source = GGUFSource(write(tmp_path / "m.gguf", tensors))
    for name in VECTORS.values():
        np.testing.assert_array_equal(source.read(f"{name}.weight"), weight, err_msg=name)
        half = source.read(f"{name}.weight", (slice(1, 3),))
        np.testing.assert_array_equal(half, weight[1:3], err_msg=name)
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight"), 1)
    # Neither offset nor put in another order.
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.weight"), q)


def test_what_the_metadata_leave_out_is_gemma3s():
    config = hf_config(PATH, METADATA, SHAPES)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["sliding_window"] == 512
    assert config["layer_types"] == [SLIDING] * 5 + [FULL, SLIDING]
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 32
    assert config["tie_word_embeddings"] is True


def test_what_the_metadata_say_is_taken():
    said = {
        "gemma3.attention.sliding_window_pattern": 3,
        "gemma3.rope.freq_base_swa": 500.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    config = hf_config(PATH, METADATA | said, SHAPES)
    assert config["layer_types"] == [SLIDING, SLIDING, FULL] * 2 + [SLIDING]
    assert config["rope_local_base_freq"] == 500.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_the_model_of_62_layers_scales_by_its_width_per_head():
    config = hf_config(PATH, METADATA | {"gemma3.block_count": 62}, SHAPES)
    assert config["query_pre_attn_scalar"] == 64 // 4


def test_a_file_may_name_each_layer():
    key = "gemma3.attention.sliding_window_pattern"
    said = [True, False, False, True, True, False, True]
    config = hf_config(PATH, METADATA | {key: np.array(said)}, SHAPES)
    assert config["layer_types"] == [SLIDING if has_window else FULL for has_window in said]
    with pytest.raises(CheckpointError, match=r"true or false for each of 7 layers, found 3"):
        hf_config(PATH, METADATA | {key: np.array(said[:3])}, SHAPES)


def test_without_a_window_all_layers_see_all():
    metadata = {key: value for key, value in METADATA.items() if "sliding" not in key}
    config = hf_config(PATH, metadata, SHAPES)
    assert (config["sliding_window"], config["layer_types"]) == (None, [FULL] * 7)
