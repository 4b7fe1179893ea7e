"""A decoder in numpy float64, written from the papers' formulas; a Hugging Face checkpoint in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def reference_decoder(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> ReferenceDecoder:
    """Of the family that config.json names."""
    kinds = {"gemma3_text": ReferenceGemma3}
    return kinds.get(config["model_type"], ReferenceDecoder)(config, tensors)


class ReferenceDecoder:
    """Whole sequences at once, no cache: logits float64[T, V] of token ids."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]):
        self._config = config
        self._tensors = {name: value.astype(np.float64) for name, value in tensors.items()}

    def logits(self, token_ids: Sequence[int]) -> Array:
        x = self._embedded(token_ids)
        for i in range(self._config["num_hidden_layers"]):
            x = self._after_layer(x, i)
        x = self._rms(x, self._tensors["model.norm.weight"])
        tied = self._config["tie_word_embeddings"]
        return x @ self._tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def _embedded(self, token_ids: Sequence[int]) -> Array:
        return self._tensors["model.embed_tokens.weight"][list(token_ids)]

    def _after_layer(self, x: Array, layer: int) -> Array:
        x = x + self._attention(self._norm(x, layer, "input_layernorm"), layer)
        return x + self._mlp(self._norm(x, layer, "post_attention_layernorm"), layer)

    def _linear(self, x: Array, layer: int, name: str) -> Array:
        at = f"model.layers.{layer}.{name}"
        return x @ self._tensors[f"{at}.weight"].T + self._tensors.get(f"{at}.bias", 0.0)

    def _norm(self, x: Array, layer: int, name: str) -> Array:
        return self._rms(x, self._tensors[f"model.layers.{layer}.{name}.weight"])

    def _rms(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self._config["rms_norm_eps"]) * weight

    def _mlp(self, x: Array, layer: int) -> Array:
        gate = self._linear(x, layer, "mlp.gate_proj")
        up = self._linear(x, layer, "mlp.up_proj")
        return self._linear(self._activation(gate) * up, layer, "mlp.down_proj")

    def _activation(self, x: Array) -> Array:
        return x / (1 + np.exp(-x))

    def _attention(self, x: Array, layer: int) -> Array:
        num_tokens, head_dim = len(x), self._config["head_dim"]
        q, k, v = (
            self._linear(x, layer, f"self_attn.{name}_proj").reshape(num_tokens, -1, head_dim)
            for name in "qkv"
        )
        q, k = self._turned(q, k, layer)
        out = np.zeros_like(q)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(self._divisor)
            scores[~self._is_seen(num_tokens, layer)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
        return self._linear(out.reshape(num_tokens, -1), layer, "self_attn.o_proj")

    @property
    def _divisor(self) -> float:
        """Its root divides q·k."""
        return self._config["head_dim"]

    def _turned(self, q: Array, k: Array, layer: int) -> tuple[Array, Array]:
        theta = self._config["rope_theta"]
        return self._rotated(q, theta), self._rotated(k, theta)

    def _is_seen(self, num_tokens: int, layer: int) -> Array:
        """bool[T, T]: by the query of each row."""
        query, key = np.indices((num_tokens, num_tokens))
        return key <= query

    def _rotated(self, x: Array, theta: float, slower: float = 1.0) -> Array:
        """Each pair (i, i + D/2) as a complex number, turned by position * theta**(-2i/D)."""
        half = x.shape[-1] // 2
        speed = theta ** (-np.arange(half) / half) / slower
        turn = np.exp(1j * np.arange(len(x))[:, None, None] * speed)
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)


class ReferenceGemma3(ReferenceDecoder):
    """Gemma 3: what is not as in Llama."""

    def _embedded(self, token_ids: Sequence[int]) -> Array:
        return super()._embedded(token_ids) * np.sqrt(self._config["hidden_size"])

    def _after_layer(self, x: Array, layer: int) -> Array:
        attended = self._attention(self._norm(x, layer, "input_layernorm"), layer)
        x = x + self._norm(attended, layer, "post_attention_layernorm")
        fed = self._mlp(self._norm(x, layer, "pre_feedforward_layernorm"), layer)
        return x + self._norm(fed, layer, "post_feedforward_layernorm")

    def _rms(self, x: Array, weight: Array) -> Array:
        return super()._rms(x, 1 + weight)

    def _activation(self, x: Array) -> Array:
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    @property
    def _divisor(self) -> float:
        return self._config["query_pre_attn_scalar"]

    def _is_sliding(self, layer: int) -> bool:
        return (layer + 1) % self._config["sliding_window_pattern"] != 0

    def _turned(self, q: Array, k: Array, layer: int) -> tuple[Array, Array]:
        q, k = self._norm(q, layer, "self_attn.q_norm"), self._norm(k, layer, "self_attn.k_norm")
        if self._is_sliding(layer):
            theta, slower = self._config["rope_local_base_freq"], 1.0
        else:
            scaling = self._config.get("rope_scaling") or {"factor": 1.0}
            theta, slower = self._config["rope_theta"], scaling["factor"]
        return self._rotated(q, theta, slower), self._rotated(k, theta, slower)

    def _is_seen(self, num_tokens: int, layer: int) -> Array:
        query, key = np.indices((num_tokens, num_tokens))
        distance = query - key
        window = self._config["sliding_window"] if self._is_sliding(layer) else num_tokens
        return (distance >= 0) & (distance < window)
