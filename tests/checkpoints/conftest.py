"""Tiny models, tokenizers and the files that hold them, written on the fly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def f(x):\n    return x ** 2  # a square, 12345 times over 678",
    "don't stop, we'll see; they've been there in 1999 and 2024.",
    "naïve café, 日本語のテキスト, Привет мир, and some more of the same text",
] * 4
TEXTS = [
    "",
    "The capital of France is",
    "1234567 12 3, 4.5e-10 x1y22z333",
    "  two  spaces\n\n\ttabs \r\n and ends ",
    "don't DON'T we'll they've it's",
    "naïve café ñ e\u0301 日本語 Привет 🌶 👨‍👩‍👧 \u00a0 x",
    "a+b<=c && !d || $e_f ^ ~g | h... (i) [j]",
    "<|im_start|>user\nhi<|im_end|>\n",
    "²½ ٣٤ Ⅷ १२३",
]


@dataclass(frozen=True)
class TinyModel:
    """Hugging Face config and tensors of a model of a few thousand weights."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


def make_model(family: str = "llama", *, tied: bool = True, vocab_size: int = 320) -> TinyModel:
    """Two layers, four query heads, two kv heads of 16."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(vocab_size, 64),
        "model.norm.weight": normal(64),
    }
    if not tied:
        tensors["lm_head.weight"] = normal(vocab_size, 64)
    for i in range(2):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": normal(64),
            f"{at}self_attn.q_proj.weight": normal(64, 64),
            f"{at}self_attn.k_proj.weight": normal(32, 64),
            f"{at}self_attn.v_proj.weight": normal(32, 64),
            f"{at}self_attn.o_proj.weight": normal(64, 64),
            f"{at}post_attention_layernorm.weight": normal(64),
            f"{at}mlp.gate_proj.weight": normal(96, 64),
            f"{at}mlp.up_proj.weight": normal(96, 64),
            f"{at}mlp.down_proj.weight": normal(64, 96),
        }
        if family == "qwen2":
            tensors |= {
                f"{at}self_attn.{x}_proj.bias": normal(n)
                for x, n in zip("qkv", (64, 32, 32), strict=True)
            }
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return TinyModel(config, tensors)


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What converters do to q and k rows of the llama family: halves of a head become pairs."""
    rows, *rest = weight.shape
    return (
        weight.reshape(num_heads, 2, rows // num_heads // 2, *rest)
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, _, kind = name.rpartition(".")
    if part in fixed:
        return f"{fixed[part]}.{kind}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{GGUF_PARTS[rest]}.{kind}"


@dataclass
class Vocabulary:
    """A tokenizer as GGUF metadata."""

    model: str
    tokens: list[Any]  # text, as the tokenizer gives it
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    pre: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """As `read_header` would give it."""
        found = {
            "model": self.model,
            "tokens": self.tokens,
            "token_type": np.array(self.types, np.int32),
            "merges": self.merges,
            "scores": None if self.scores is None else np.array(self.scores, np.float32),
            "pre": self.pre,
            **self.extra,
        }
        return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def train_byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None, *, vocab_size: int = 320
) -> Tokenizer:
    """A byte-level BPE with the control tokens <unk>, <|im_start|>, <|im_end|> at 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def as_vocabulary(tokenizer: Tokenizer, pre: str | None) -> Vocabulary:
    """The GGUF form of a byte-level tokenizer."""
    size = tokenizer.get_vocab_size()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return Vocabulary(
        model="gpt2",
        tokens=[tokenizer.id_to_token(i) for i in range(size)],
        types=[UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (size - 3),
        merges=[" ".join(pair) for pair in merges],
        pre=pre,
        extra={"bos_token_id": 1, "eos_token_id": 2},
    )


def write_gguf(
    path: Path,
    model: TinyModel,
    vocabulary: Vocabulary | None = None,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """The model as a converter writes it; matrices in `quantization`, vectors in F32."""
    family, config = model.config["model_type"], model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in (vocabulary.metadata() if vocabulary else {}).items():
        _add(writer, key, value)
    for name, tensor in model.tensors.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        key = heads.get(name.split(".")[-2]) if family == "llama" else None
        stored = tensor if key is None else interleaved(tensor, config[key])
        if stored.ndim == 2 and quantization != GGMLQuantizationType.F32:
            packed = gguf.quants.quantize(stored, quantization)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), stored)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)


def write_folder(
    folder: Path,
    model: TinyModel,
    tokenizer: Tokenizer | None = None,
    *,
    shards: Sequence[Sequence[str]] = (),
    **files: Any,
) -> Path:
    """A Hugging Face folder; `shards`: the tensor names of each, `files`: more JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    (tokenizer or train_byte_level()).save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    if not shards:
        save_file(model.tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: model.tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@dataclass(frozen=True)
class Tiny:
    """What the tests of this folder build their worlds with."""

    texts = TEXTS
    model = staticmethod(make_model)
    byte_level = staticmethod(train_byte_level)
    vocabulary = staticmethod(as_vocabulary)
    Vocabulary = Vocabulary
    gguf = staticmethod(write_gguf)
    folder = staticmethod(write_folder)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()
