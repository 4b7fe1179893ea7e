"""Gemma 3's text decoder (arXiv:2503.19786).

Five layers of six see a window of tokens and turn by their own rotary base; each part of a layer is
normed before and after, q and k are normed before they turn, norms multiply by 1 + weight, and the
embedding is scaled by the root of its width.
"""

from __future__ import annotations

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.attention import Attention, KVCache
from jaxinfer.models.config import LayerType, ModelConfig
from jaxinfer.models.layers import MLP, OffsetRMSNorm, embedding
from jaxinfer.models.rope import RopeTables, inverse_frequencies, rope_tables
from pallas_kernels.rounded import rounded

LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)


class Gemma3Attention(Attention):
    """With norms of each query and key."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, layer_type: LayerType):
        super().__init__(config, arithmetic, layer_type)
        norm = partial(OffsetRMSNorm, eps=config.rms_norm_eps, arithmetic=arithmetic)
        self.q_norm, self.k_norm = norm(config.head_dim), norm(config.head_dim)

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super().heads(x)
        normed_q, normed_k = (
            norm(heads.reshape(-1, self.head_dim)).reshape(heads.shape)
            for norm, heads in ((self.q_norm, q), (self.k_norm, k))
        )
        return normed_q, normed_k, v


class Gemma3Layer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, layer_type: LayerType):
        norm = partial(
            OffsetRMSNorm, config.hidden_size, eps=config.rms_norm_eps, arithmetic=arithmetic
        )
        self.input_layernorm = norm()
        self.self_attn = Gemma3Attention(config, arithmetic.inside("self_attn"), layer_type)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            use_bias=config.mlp_bias,
            arithmetic=arithmetic.inside("mlp"),
            activation=config.hidden_act,
        )
        self.post_feedforward_layernorm = norm()
        self.table = LAYER_TYPES.index(layer_type)

    def __call__(self, x: jax.Array, rope: tuple[RopeTables, ...], kv_cache: KVCache) -> jax.Array:
        """float[T, E] -> float[T, E]."""
        with jax.named_scope("attn"):
            out = self.self_attn(self.input_layernorm(x), rope[self.table], kv_cache)
            x = x + rounded(self.post_attention_layernorm(out))
        with jax.named_scope("mlp"):
            out = self.mlp(self.pre_feedforward_layernorm(x))
            return x + rounded(self.post_feedforward_layernorm(out))


class Gemma3Top(nnx.Module):
    """What stands before and after the layers."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic):
        dim, vocab_size = config.hidden_size, config.vocab_size
        self.embed_tokens = embedding(vocab_size, dim, arithmetic=arithmetic)
        self.norm = OffsetRMSNorm(dim, eps=config.rms_norm_eps, arithmetic=arithmetic)
        if not config.tie_word_embeddings:
            self.lm_head = embedding(vocab_size, dim, arithmetic=arithmetic)
        self.config = config

    def begin(
        self, token_ids: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, tuple[RopeTables, ...]]:
        """int32[T], int32[T] -> what the first layer takes: float[T, E], tables by layer type."""
        rope = tuple(
            rope_tables(positions, inverse_frequencies(self.config, kind)) for kind in LAYER_TYPES
        )
        x = self.embed_tokens(token_ids)
        scale = jnp.asarray(self.config.hidden_size**0.5, x.dtype)  # rounded as the model was made
        return rounded(x * scale), rope

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float[N, E], after `norm` -> float32[N, V]."""
        with jax.named_scope("head"):
            head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
            return head.logits(hidden)
