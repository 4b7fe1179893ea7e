"""How a decoder meets its KV cache: one protocol, whoever keeps the keys and values."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.layers import RMSNorm, layer_product, norm
from jaxinfer.models.rope import Rope, apply_rope
from pallas_kernels.kv_write import quantize


class KVCache(Protocol):
    """Keeps the keys and values of one layer.

    Implementations: `DenseKV` and `QuantizedDenseKV` below, and `PagedKV` in
    jaxinfer/runtime/kv_cache.py.
    """

    @property
    def is_token(self) -> jax.Array | None:
        """bool[T]: the others are padding; None: all are tokens."""
        ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        """Stores k, v float[T, K, D] and attends q float[T, H, D] to what it may see.

        Args:
            scale: multiplies q·k; None: D**-0.5.
            window: tokens that a query sees, itself included; None: all before it.
            soft_cap: c of c * tanh(q·k / c); None: q·k as it is.
        Returns: float[T, H, D].
        """
        ...


class DenseKV:
    """One sequence's keys and values in one layer as growing arrays, for tests and research.

    Call the model with the next tokens of the same sequence, in order; plain softmax over all of
    it, in float32.
    """

    is_token = None

    def __init__(self, config: ModelConfig):
        empty = jnp.zeros((0, config.num_key_value_heads, config.head_dim), jnp.float32)
        self.keys, self.values = empty, empty

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        factor: float = q.shape[-1] ** -0.5 if scale is None else scale
        keys = self.keys = jnp.concatenate([self.keys, k.astype(jnp.float32)])
        values = self.values = jnp.concatenate([self.values, v.astype(jnp.float32)])
        shared = q.shape[1] // k.shape[1]
        keys, values = (jnp.repeat(x, shared, axis=1) for x in (keys, values))
        scores = jnp.einsum("thd,uhd->htu", q.astype(jnp.float32) * factor, keys)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        num_new, num_all = q.shape[0], keys.shape[0]
        is_seen = jnp.tril(jnp.ones((num_new, num_all), bool), num_all - num_new)
        if window is not None:
            is_seen = jnp.triu(is_seen, num_all - num_new - window + 1)
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("htu,uhd->thd", weights, values).astype(q.dtype)


class QuantizedDenseKV(DenseKV):
    """The same with keys and values rounded to int8 as a pool of int8 pages rounds them: with a
    scale for each token and head.
    """

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        return super().attend(
            q, through_int8(k), through_int8(v), scale=scale, window=window, soft_cap=soft_cap
        )


def through_int8(x: jax.Array) -> jax.Array:
    """float[T, K, D] keys or values -> float32[T, K, D], as a pool of int8 gives them back."""
    numbers, scale = quantize(x)
    return numbers.astype(jnp.float32) * scale


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, kind: LayerKind):
        dim, head_dim = config.hidden_size, config.head_dim
        q_dim, kv_dim = (
            n * head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        qkv_product = partial(layer_product, use_bias=config.qkv_bias, arithmetic=arithmetic)
        self.q_proj = qkv_product("q_proj", dim, q_dim)
        self.k_proj = qkv_product("k_proj", dim, kv_dim)
        self.v_proj = qkv_product("v_proj", dim, kv_dim)
        self.o_proj = layer_product(
            "o_proj", q_dim, dim, use_bias=config.out_bias, arithmetic=arithmetic
        )
        is_whole = config.qk_norm == "whole"
        self.q_norm, self.k_norm = (
            norm(config, arithmetic, width if is_whole else head_dim) if config.qk_norm else None
            for width in (q_dim, kv_dim)
        )
        self.norms_heads = config.qk_norm == "head"
        self.head_dim, self.scale = head_dim, config.attention_scale
        self.window = config.window_of(kind.attention)
        self.soft_cap = config.attn_logit_softcapping
        table = config.rope_types.index(kind.attention) if config.has_local_rope else 0
        self.table = table if kind.has_rope else None

    def __call__(self, x: jax.Array, rope: Rope, kv_cache: KVCache) -> jax.Array:
        """float[T, E] -> float[T, E]."""
        q, k, v = self.heads(x)
        if self.table is not None:
            q, k = (apply_rope(heads, *rope[self.table]) for heads in (q, k))
        out = kv_cache.attend(q, k, v, scale=self.scale, window=self.window, soft_cap=self.soft_cap)
        return self.o_proj(out.reshape(x.shape[0], -1))

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries float[T, H, D], keys and values float[T, K, D] of x, before rotation."""
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k, v = (x.reshape(x.shape[0], -1, self.head_dim) for x in (q, k, v))
        return q, k, v

    def _normed(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        """float[T, heads * D], each head or the whole of it."""
        if norm is None:
            return x
        return norm(x.reshape(-1, self.head_dim)).reshape(x.shape) if self.norms_heads else norm(x)
