"""A tiny checkpoint as a decoder with its parameters, and as a reference decoder."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.checkpoint import open_checkpoint
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.weights import load_weights
from tests.models.reference_decoder import ReferenceDecoder, reference_decoder
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

ONE_KV_HEAD: dict[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
GRANITE: dict[str, Any] = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
OLMO2: dict[str, Any] = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 9,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "intermediate_size": 24,
    "num_experts": 7,
    "num_experts_per_tok": 2,
}
GEMMA2: dict[str, Any] = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "sliding_window_pattern": 3,  # layers 0, 1 and 3 slide
    "query_pre_attn_scalar": 24,
    "rope_theta": 1e6,
    "rope_local_base_freq": 500.0,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class TinyDecoder:
    decoder: Decoder
    params: dict[str, Any]
    reference: ReferenceDecoder

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    def random_ids(self, length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.vocab_size, length).tolist()

    def dense(self, token_ids: list[int], cuts: tuple[int, ...] = ()) -> np.ndarray:
        return dense_logits(self.decoder, self.params, token_ids, cuts)


def dense_logits(
    decoder: Decoder, params: dict[str, Any], token_ids: list[int], cuts: tuple[int, ...] = ()
) -> np.ndarray:
    """Logits float32[T, V] by DenseKV, in chunks that begin at 0 and at `cuts`."""
    bounds = (0, *cuts, len(token_ids))

    @jax.jit
    def run(params: dict[str, Any], ids: jax.Array) -> jax.Array:
        caches = [DenseKV(decoder.config) for _ in params["layers"]]
        chunks = [
            decoder.run_dense(params, ids[start:end], caches, start)
            for start, end in itertools.pairwise(bounds)
        ]
        return jnp.concatenate(chunks)

    return np.asarray(run(params, np.array(token_ids, np.int32)))


def load_tiny(folder: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any):
    """Writes a checkpoint, loads it through the real loader, and keeps its tensors beside."""
    model = write_checkpoint(folder, seed=seed, **changes)
    checkpoint = open_checkpoint(model)
    decoder = decoder_for(checkpoint.config, dtype=jnp.dtype(dtype))
    params = load_weights(checkpoint, decoder)
    jax.block_until_ready(params)
    checkpoint.close()
    config = tiny_config(**changes)
    return TinyDecoder(decoder, params, reference_decoder(config, tiny_tensors(config, seed)))
