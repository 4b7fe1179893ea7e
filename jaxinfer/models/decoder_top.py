"""What stands before and after a decoder's layers: one module for all families."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layers import embedding, norm
from jaxinfer.models.rope import Rope, attention_factor, inverse_frequencies, rope_tables
from pallas_kernels.rounded import rounded


class DecoderTop(nnx.Module):
    """Embedding, rotary tables, last norm and head."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic):
        dim, vocab_size = config.hidden_size, config.vocab_size
        self.embed_tokens = embedding(vocab_size, dim, arithmetic=arithmetic)
        self.norm = norm(config, arithmetic)
        if not config.tie_word_embeddings:
            self.lm_head = embedding(vocab_size, dim, arithmetic=arithmetic)
        self.config = config

    def begin(self, token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, Rope]:
        """int32[T], int32[T] -> what the first layer takes: float[T, E] and the rotary tables."""
        rope = tuple(
            rope_tables(
                positions,
                inverse_frequencies(self.config, kind),
                attention_factor(self.config, kind),
            )
            for kind in self.config.rope_types
        )
        x, multiplier = self.embed_tokens(token_ids), self.config.embedding_multiplier
        if multiplier != 1.0:  # rounded as Gemma was made
            x = rounded(x * jnp.asarray(multiplier, x.dtype))
        return x, rope

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float[N, E], after `norm` -> float32[N, V]."""
        config = self.config
        with jax.named_scope("head"):
            head = self.embed_tokens if config.tie_word_embeddings else self.lm_head
            logits = head.logits(hidden)
            if config.logits_scaling != 1.0:
                logits = logits / config.logits_scaling
            cap = config.final_logit_softcapping
            return logits if cap is None else rounded(jnp.tanh(logits / cap) * cap)
