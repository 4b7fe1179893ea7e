"""A decoder in numpy float64, written from the papers' formulas; a Hugging Face checkpoint in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


class ReferenceDecoder:
    """Whole sequences at once, no cache: logits float64[T, V] of token ids."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]):
        self._config = config
        self._tensors = {name: value.astype(np.float64) for name, value in tensors.items()}

    def logits(self, token_ids: Sequence[int]) -> Array:
        x = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        for i in range(self._config["num_hidden_layers"]):
            x = x + self._attention(self._norm(x, i, "input_layernorm"), i)
            x = x + self._mlp(self._norm(x, i, "post_attention_layernorm"), i)
        x = self._rms(x, self._tensors["model.norm.weight"])
        tied = self._config["tie_word_embeddings"]
        return x @ self._tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T

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
        return self._linear(gate / (1 + np.exp(-gate)) * up, layer, "mlp.down_proj")

    def _attention(self, x: Array, layer: int) -> Array:
        num_tokens, head_dim = len(x), self._config["head_dim"]
        q, k, v = (
            self._linear(x, layer, f"self_attn.{name}_proj").reshape(num_tokens, -1, head_dim)
            for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        out = np.zeros_like(q)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(head_dim)
            scores[np.triu_indices(num_tokens, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
        return self._linear(out.reshape(num_tokens, -1), layer, "self_attn.o_proj")

    def _rotated(self, x: Array) -> Array:
        """Each pair (i, i + D/2) as a complex number, turned by position * theta**(-2i/D)."""
        half = x.shape[-1] // 2
        speed = self._config["rope_theta"] ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(len(x))[:, None, None] * speed)
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)
