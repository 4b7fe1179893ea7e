"""Models of two layers with random weights, as checkpoint files written on the fly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench.tiny_tokenizer import byte_level
from checkpoints.formats import CONFIG_KEY, Quantization, WeightFormat
from checkpoints.rounding import round_to_nearest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = "<|im_end|>"
PRE_NORMS = ("input", "post_attention")
POST_NORMS = ("post_attention", "post_feedforward")
SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward", "post_feedforward")
NORMS = {"gemma2": SANDWICH_NORMS, "gemma3_text": SANDWICH_NORMS, "olmo2": POST_NORMS}
"""By model_type; the others have PRE_NORMS."""
NORMED_HEADS = ("gemma3_text", "qwen3", "qwen3_moe")
NORMED_WHOLE = ("olmo2", "olmoe")
GATED = ("gate_proj", "up_proj", "down_proj")
IN_FLOATS = (".gate", ".shared_expert_gate")
"""Products that are never quantized end so."""
X_SCALE = 4 / 127
"""Static scale of the inputs of every product: a few are beyond it."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a Llama with grouped heads whose width is not the hidden size."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": byte_level().get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 640,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    return config | changes


EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen2_moe": ("mlp", GATED),
    "qwen3_moe": ("mlp", GATED),
    "olmoe": ("mlp", GATED),
}
"""By model_type: where the experts are in a layer, and their products."""


def gated(
    name: str, dim: int, hidden: int, products: tuple[str, str, str] = GATED
) -> dict[str, tuple[int, ...]]:
    """The tensors of an MLP."""
    gate, up, down = (f"{name}.{product}.weight" for product in products)
    return {gate: (hidden, dim), up: (hidden, dim), down: (dim, hidden)}


def experts(layer: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a sparse layer's mixture."""
    place, products = EXPERTS[config["model_type"]]
    dim, count = config["hidden_size"], config.get("num_experts") or config["num_local_experts"]
    hidden = config.get("moe_intermediate_size", config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.{place}.gate.weight": (count, dim)}
    for i in range(count):
        shapes |= gated(f"{layer}.{place}.experts.{i}", dim, hidden, products)
    if shared := config.get("shared_expert_intermediate_size"):
        shapes |= gated(f"{layer}.mlp.shared_expert", dim, shared)
        shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, dim)
    return shapes


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a checkpoint, in Hugging Face's words."""
    dim, mlp, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    family = config["model_type"]
    has_bias = config.get("attention_bias") or family in ("qwen2", "qwen2_moe")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, dim),
        "model.norm.weight": (dim,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norms = NORMS.get(family, PRE_NORMS)
        shapes |= {f"{layer}.{x}_layernorm.weight": (dim,) for x in norms if x in PRE_NORMS}
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (q, dim),
            f"{layer}.self_attn.k_proj.weight": (kv, dim),
            f"{layer}.self_attn.v_proj.weight": (kv, dim),
            f"{layer}.self_attn.o_proj.weight": (dim, q),
        }
        is_dense = family not in EXPERTS or i in config.get("mlp_only_layers", ())
        shapes |= gated(f"{layer}.mlp", dim, mlp) if is_dense else experts(layer, config)
        shapes |= {f"{layer}.{x}_layernorm.weight": (dim,) for x in norms if x not in PRE_NORMS}
        if family in NORMED_HEADS:
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
        if family in NORMED_WHOLE:
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (n,) for x, n in (("q", q), ("k", kv))}
        if has_bias:
            shapes |= {
                f"{layer}.self_attn.{x}_proj.bias": (size,)
                for x, size in (("q", q), ("k", kv), ("v", kv))
            }
        if config.get("attention_bias"):
            shapes[f"{layer}.self_attn.o_proj.bias"] = (dim,)
        if config.get("mlp_bias"):
            shapes |= {
                f"{layer}.mlp.{x}_proj.bias": (size,)
                for x, size in (("gate", mlp), ("up", mlp), ("down", dim))
            }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors, scaled so that the model's choices are neither flat nor certain."""
    rng = np.random.default_rng(seed)
    tensors = {}
    norm_mean = 0.0 if config["model_type"].startswith("gemma") else 1.0  # Gemma's are 1 + weight
    for name, shape in tensor_shapes(config).items():
        is_norm = name.endswith("norm.weight")
        scale = 0.1 if is_norm else 0.5 if name.endswith("bias") else 1.5 * shape[-1] ** -0.5
        values = rng.normal(size=shape) * scale + (norm_mean if is_norm else 0.0)
        tensors[name] = values.astype(np.float32)
    return tensors


def quantized_tensors(
    tensors: dict[str, np.ndarray], quantization: Quantization
) -> dict[str, np.ndarray]:
    """The same rounded to the nearest, as a quantized checkpoint holds them."""
    parts: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        product = name.removesuffix(".weight")
        is_product = tensor.ndim == 2 and not product.endswith(IN_FLOATS)
        kept = _format_of(product, quantization) if is_product else None
        if kept is None:
            parts[name] = tensor
            continue
        rounded = round_to_nearest(tensor, kept).parts()
        parts |= {f"{product}.{part}": value for part, value in rounded.items()}
        if kept.activations == "int8_static":
            parts[f"{product}.x_scale"] = np.array(X_SCALE, np.float32)
    return parts


def _format_of(product: str, quantization: Quantization) -> WeightFormat | None:
    is_layer = product.startswith("model.layers.")
    return quantization.of(product.removeprefix("model.")) if is_layer else quantization.head


def write_checkpoint(
    folder: Path, *, seed: int = 0, quantization: Quantization | None = None, **changes: Any
) -> Path:
    """A complete Hugging Face folder; `changes` are keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = byte_level()
    config = tiny_config(**changes)
    config.setdefault("eos_token_id", backend.token_to_id(EOS))
    tensors = tiny_tensors(config, seed)
    if quantization is not None:
        config[CONFIG_KEY] = quantization.to_config()
        tensors = quantized_tensors(tensors, quantization)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": EOS, "chat_template": TEMPLATE})
    )
    return folder
