"""The reference's own reading of GGUF: names and rotary rows, by hand; no model file."""

import numpy as np
import pytest
from gguf import GGUFWriter

from tests.oracle.gguf_file import GGUFModel, hf_name, unpermute


def test_rotary_pairs_side_by_side_become_two_halves():
    rows = np.array([[0.0], [2.0], [1.0], [3.0]])  # one head of 4: pairs (0, 2) and (1, 3)
    assert unpermute(rows, 1).ravel().tolist() == [0, 1, 2, 3]


def test_each_head_is_reordered_on_its_own():
    rows = np.array([[0.0], [2.0], [1.0], [3.0], [4.0], [6.0], [5.0], [7.0]])
    assert unpermute(rows, 2).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_a_tensor_has_its_hugging_face_name(name, expected):
    assert hf_name(name) == expected


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q_norm.weight"])
def test_an_unknown_tensor_is_an_error(name):
    with pytest.raises(KeyError):
        hf_name(name)


def write_tiny(path, pre: str) -> None:
    """One layer, width 4, 2 heads and 1 kv head of 2, F32; the tokens are bytes of "ab1 "."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<end>", "a", "b", "1", "ab", "11", "Ġ"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "1 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_tensor("token_embd.weight", np.arange(28, dtype=np.float32).reshape(7, 4))
    writer.add_tensor("blk.0.attn_q.weight", np.arange(16, dtype=np.float32).reshape(4, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_gives_configuration_and_weights(tmp_path):
    write_tiny(tmp_path / "tiny.gguf", "smollm")
    model = GGUFModel(tmp_path / "tiny.gguf")
    config = model.config()
    assert (config["vocab_size"], config["hidden_size"], config["head_dim"]) == (7, 4, 2)
    assert config["tie_word_embeddings"] is True
    weights = model.weights()
    assert set(weights) == {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"}
    assert weights["model.embed_tokens.weight"][1].tolist() == [4, 5, 6, 7]
    # A head of 2 has one rotary pair, so its rows stay in place.
    assert weights["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == [0, 4, 8, 12]


def test_digits_stand_alone_even_where_a_merge_exists_and_control_tokens_are_found(tmp_path):
    write_tiny(tmp_path / "tiny.gguf", "smollm")
    tokenizer = GGUFModel(tmp_path / "tiny.gguf").tokenizer()
    assert tokenizer.encode("ab11 a<end>").ids == [4, 3, 3, 6, 1, 0]
    assert tokenizer.decode([4, 3, 3, 6, 1, 0], skip_special_tokens=False) == "ab11 a<end>"


def test_a_file_with_another_pre_tokenizer_is_refused(tmp_path):
    write_tiny(tmp_path / "tiny.gguf", "llama-bpe")
    with pytest.raises(ValueError, match="llama-bpe"):
        GGUFModel(tmp_path / "tiny.gguf")
