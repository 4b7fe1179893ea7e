"""SmolLM2's weights, configuration and tokenizer out of its GGUF file, for the reference only.

Written apart from the product on purpose: imports nothing of jaxinfer or checkpoints, so that an
error in their GGUF reader cannot hide in the golden file too. Needs numpy, gguf, tokenizers.
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # gguf token type of <|im_start|> and the like
LAYER_NAMES = {
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


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of q/k rows: (pair, half) within each head becomes (half, pair).

    Args:
        rows: [num_heads * D, E], in each head the rotary pairs side by side.
    Returns: the same rows, in each head all first halves of the pairs, then all second halves.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def hf_name(name: str) -> str:
    """The Hugging Face name of a llama-family GGUF tensor; KeyError if there is none."""
    if name.startswith("blk."):
        _, layer, kind, _ = name.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }[name]


class GGUFModel:
    """One opened file.

    Raises: ValueError if the file is not of the llama architecture with SmolLM's tokenizer.
    """

    def __init__(self, path: Path):
        self._reader = GGUFReader(path)
        self._metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        kinds = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
        found = tuple(self._metadata.get(kind) for kind in kinds)
        if found != ("llama", "gpt2", "smollm"):
            raise ValueError(
                f"{path}: expected architecture, tokenizer and pre-tokenizer llama, gpt2, smollm, "
                f"found {found}"
            )

    def config(self) -> dict[str, Any]:
        """The arguments of transformers' LlamaConfig."""
        get = self._metadata.__getitem__
        heads, width = get("llama.attention.head_count"), get("llama.embedding_length")
        return {
            "vocab_size": len(get("tokenizer.ggml.tokens")),
            "hidden_size": width,
            "intermediate_size": get("llama.feed_forward_length"),
            "num_hidden_layers": get("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("llama.attention.head_count_kv"),
            "head_dim": width // heads,
            "max_position_embeddings": get("llama.context_length"),
            "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": {"rope_type": "default", "rope_theta": get("llama.rope.freq_base")},
            "tie_word_embeddings": all(t.name != "output.weight" for t in self._reader.tensors),
            "bos_token_id": get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Every tensor as f32 [out, in] under its Hugging Face name."""
        config = self.config()
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        weights = {}
        for tensor in self._reader.tensors:
            rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = tensor.name.split(".")[-2]
            weights[hf_name(tensor.name)] = (
                unpermute(rows, heads[kind]) if kind in heads else np.ascontiguousarray(rows)
            )
        return weights

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE, every digit alone; control tokens in a text are recognized."""
        tokens = self._metadata["tokenizer.ggml.tokens"]
        types = self._metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in self._metadata["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in control]
        )
        return tokenizer
