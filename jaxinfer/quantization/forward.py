"""A decoder over whole windows of text, without pages: what calibration and comparisons run.

Layer by layer, each kind of layer compiled once for a length of window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.attention import DenseKV, KVCache
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.steps import Params


class Forward:
    """The programs of a window from position 0: begin, a layer of each kind, and end (the logits).

    Args:
        make_cache: keeps a layer's keys and values, e.g. to quantize them.
    """

    def __init__(self, decoder: Decoder, make_cache: Callable[[ModelConfig], KVCache] = DenseKV):
        self.decoder = decoder
        self._make_cache = make_cache
        self.begin = jax.jit(self._begin)
        self.layers = [
            jax.jit(partial(self._layer, kind=kind)) for kind in range(len(decoder.layers))
        ]
        self.end = jax.jit(self._end)

    def _begin(self, top: Params, token_ids: jax.Array) -> tuple[jax.Array, Any]:
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        return self.decoder.bind_top(top).begin(token_ids, positions)

    def _layer(self, params: Params, x: jax.Array, rope: Any, *, kind: int) -> jax.Array:
        cache = self._make_cache(self.decoder.config)
        return self.decoder.bind_layer(params, kind)(x, rope, cache)

    def _end(self, top: Params, x: jax.Array) -> jax.Array:
        bound = self.decoder.bind_top(top)
        return bound.logits(bound.norm(x))
