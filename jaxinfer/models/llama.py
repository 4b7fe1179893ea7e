"""The Llama family: pre-norm decoder with grouped-query attention, RoPE, RMSNorm and SwiGLU.

Also Mistral (without sliding window) and Qwen2 (bias on q, k, v). Attribute names are those of the
Hugging Face checkpoint, so the parameter tree is the weight plan (jaxinfer/models/registry.py).
"""

from __future__ import annotations

import jax
from flax import nnx

from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.attention import Attention, KVCache
from jaxinfer.models.config import LayerType, ModelConfig
from jaxinfer.models.layers import MLP, RMSNorm, embedding
from jaxinfer.models.rope import RopeTables, inverse_frequencies, rope_tables


class LlamaLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the same module for all layers."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, layer_type: LayerType):
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(dim, eps=eps, arithmetic=arithmetic)
        self.self_attn = Attention(config, arithmetic.inside("self_attn"), layer_type)
        self.post_attention_layernorm = RMSNorm(dim, eps=eps, arithmetic=arithmetic)
        self.mlp = MLP(
            dim,
            config.intermediate_size,
            use_bias=config.mlp_bias,
            arithmetic=arithmetic.inside("mlp"),
            activation=config.hidden_act,
        )

    def __call__(self, x: jax.Array, rope: RopeTables, kv_cache: KVCache) -> jax.Array:
        """float[T, E] -> float[T, E]."""
        with jax.named_scope("attn"):
            x = x + self.self_attn(self.input_layernorm(x), rope, kv_cache)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x))


class LlamaTop(nnx.Module):
    """What stands before and after the layers."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic):
        dim, vocab_size = config.hidden_size, config.vocab_size
        self.embed_tokens = embedding(vocab_size, dim, arithmetic=arithmetic)
        self.norm = RMSNorm(dim, eps=config.rms_norm_eps, arithmetic=arithmetic)
        if not config.tie_word_embeddings:
            self.lm_head = embedding(vocab_size, dim, arithmetic=arithmetic)
        self.config = config

    def begin(self, token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, RopeTables]:
        """int32[T], int32[T] -> what the first layer takes: float[T, E] and the rotary tables."""
        rope = rope_tables(positions, inverse_frequencies(self.config))
        return self.embed_tokens(token_ids), rope

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float[N, E], after `norm` -> float32[N, V]."""
        with jax.named_scope("head"):
            head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
            return head.logits(hidden)
