"""The layers that decoders repeat, by where they put their norms.

Attribute names are those of the Hugging Face checkpoint, so the parameter tree is the weight plan
(decoder.py).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.attention import Attention, KVCache
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.experts import SparseMLP
from jaxinfer.models.layers import MLP, norm
from jaxinfer.models.rope import Rope
from pallas_kernels.rounded import rounded

MakeLayer = Callable[[ModelConfig, Arithmetic, LayerKind], nnx.Module]
"""Called with (float[T, E], Rope, KVCache), the layer gives float[T, E]."""


def feed_forward(config: ModelConfig, arithmetic: Arithmetic) -> MLP:
    return MLP(
        config.hidden_size,
        config.intermediate_size,
        use_bias=config.mlp_bias,
        arithmetic=arithmetic,
        activation=config.hidden_act,
    )


def scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """x * multiplier, rounded before anything is added to it."""
    return x if multiplier == 1.0 else rounded(x * multiplier)


class PreNormLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): Llama's, and most others'."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, kind: LayerKind):
        self.input_layernorm = norm(config, arithmetic)
        self.self_attn = Attention(config, arithmetic.inside("self_attn"), kind)
        self.post_attention_layernorm = norm(config, arithmetic)
        self.mlp = self._mlp(config, arithmetic.inside("mlp"), kind)
        self.multiplier = config.residual_multiplier

    def __call__(self, x: jax.Array, rope: Rope, kv_cache: KVCache) -> jax.Array:
        """float[T, E] -> float[T, E]."""
        with jax.named_scope("attn"):
            out = self.self_attn(self.input_layernorm(x), rope, kv_cache)
            x = x + scaled(out, self.multiplier)
        with jax.named_scope("mlp"):
            normed, mlp = self.post_attention_layernorm(x), self.mlp
            is_sparse = isinstance(mlp, SparseMLP)
            out = mlp(normed, kv_cache.is_token) if is_sparse else mlp(normed)
            return x + scaled(out, self.multiplier)

    @staticmethod
    def _mlp(config: ModelConfig, arithmetic: Arithmetic, kind: LayerKind) -> MLP | SparseMLP:
        if not kind.is_sparse or config.experts is None:
            return feed_forward(config, arithmetic)
        return SparseMLP(
            config.hidden_size,
            config.experts,
            arithmetic=arithmetic,
            activation=config.hidden_act,
        )


class SandwichLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): Gemma's since its second."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, kind: LayerKind):
        self.input_layernorm = norm(config, arithmetic)
        self.self_attn = Attention(config, arithmetic.inside("self_attn"), kind)
        self.post_attention_layernorm = norm(config, arithmetic)
        self.pre_feedforward_layernorm = norm(config, arithmetic)
        self.mlp = feed_forward(config, arithmetic.inside("mlp"))
        self.post_feedforward_layernorm = norm(config, arithmetic)

    def __call__(self, x: jax.Array, rope: Rope, kv_cache: KVCache) -> jax.Array:
        """float[T, E] -> float[T, E]."""
        with jax.named_scope("attn"):
            out = self.self_attn(self.input_layernorm(x), rope, kv_cache)
            x = x + rounded(self.post_attention_layernorm(out))
        with jax.named_scope("mlp"):
            out = self.mlp(self.pre_feedforward_layernorm(x))
            return x + rounded(self.post_feedforward_layernorm(out))


class PostNormLayer(nnx.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)): OLMo 2's."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, kind: LayerKind):
        self.self_attn = Attention(config, arithmetic.inside("self_attn"), kind)
        self.post_attention_layernorm = norm(config, arithmetic)
        self.mlp = feed_forward(config, arithmetic.inside("mlp"))
        self.post_feedforward_layernorm = norm(config, arithmetic)

    def __call__(self, x: jax.Array, rope: Rope, kv_cache: KVCache) -> jax.Array:
        """float[T, E] -> float[T, E]."""
        with jax.named_scope("attn"):
            out = self.self_attn(x, rope, kv_cache)
            x = x + rounded(self.post_attention_layernorm(out))
        with jax.named_scope("mlp"):
            return x + rounded(self.post_feedforward_layernorm(self.mlp(x)))
