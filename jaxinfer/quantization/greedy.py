"""What a model answers greedily to some prompts: a row for each, all rows at the same position.

Prompts are fed token by token, so one program per kind of layer does everything. For a dozen short
prompts; the engine is for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import MIN_ROWS
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.steps import Params, Rope, without_layers

MAX_PROMPT_TOKENS = 1024
ROUND_UP = 64  # positions of the cache, so that programs of like lengths are the same
RoundKV = Callable[[jax.Array], jax.Array]
"""float[N, K, D] keys or values as a KV pool would give them back."""
Cache = tuple[jax.Array, jax.Array]
"""Keys and values of a layer, each float32[N, S, K, D]."""


class RowsKV:
    """A `KVCache` of N sequences that are all at position `at`; lives while a layer is traced.

    Args:
        cache: afterwards, `cache` holds this position's too.
    """

    def __init__(self, cache: Cache, at: jax.Array, round_kv: RoundKV):
        self.cache, self._at, self._round = cache, at, round_kv

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
        keys, values = (
            kept.at[:, self._at].set(self._round(new).astype(jnp.float32))
            for kept, new in zip(self.cache, (k, v), strict=True)
        )
        self.cache = keys, values
        num_rows, _, head_dim = q.shape
        grouped = q.astype(jnp.float32).reshape(num_rows, k.shape[1], -1, head_dim)
        scores = jnp.einsum("nkgd,nskd->nkgs", grouped * (scale or head_dim**-0.5), keys)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        before = self._at - jnp.arange(keys.shape[1])
        is_seen = (before >= 0) & (before < (window or keys.shape[1]))
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("nkgs,nskd->nkgd", weights, values).reshape(q.shape).astype(q.dtype)


class Rows:
    """N sequences of a model, one token further at each `step`; from position 0 on they are others.

    Args:
        num_rows: N, which becomes MIN_ROWS at least.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        *,
        num_rows: int,
        num_positions: int,
        round_kv: RoundKV = lambda x: x,
    ):
        self._decoder, self._params, self._round = decoder, params, round_kv
        self._top = without_layers(params)
        config = decoder.config
        size = -(-num_positions // ROUND_UP) * ROUND_UP
        self.num_rows, self.num_positions = max(num_rows, MIN_ROWS), size
        shape = self.num_rows, size, config.num_key_value_heads, config.head_dim
        self._caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in params["layers"]]
        self._begin = jax.jit(self._first)
        kinds = range(len(decoder.layers))
        self._layers = [
            jax.jit(partial(self._layer, kind=kind), donate_argnames="cache") for kind in kinds
        ]
        self._end = jax.jit(self._last)

    def step(self, token_ids: Sequence[int], at: int) -> np.ndarray:
        """The likeliest next tokens, int32[N], after token_ids at position `at`.

        Raises: EngineFailure for logits that are not finite.
        """
        place = jnp.asarray(at, jnp.int32)
        x, rope = self._begin(self._top, jnp.asarray(token_ids, jnp.int32), place)
        kinds = self._decoder.layer_kinds
        for i, (layer, kind) in enumerate(zip(self._params["layers"], kinds, strict=True)):
            x, self._caches[i] = self._layers[kind](layer, self._caches[i], x, rope, place)
        likeliest, is_finite = self._end(self._top, x)
        if not np.asarray(is_finite).all():
            raise EngineFailure(f"a model gave NaN or infinite logits after token {at} of a prompt")
        return np.asarray(likeliest)

    def _first(self, top: Params, token_ids: jax.Array, at: jax.Array) -> tuple[jax.Array, Rope]:
        return self._decoder.bind_top(top).begin(token_ids, jnp.broadcast_to(at, token_ids.shape))

    def _layer(
        self, params: Params, cache: Cache, x: jax.Array, rope: Rope, at: jax.Array, *, kind: int
    ) -> tuple[jax.Array, Cache]:
        kv_cache = RowsKV(cache, at, self._round)
        return self._decoder.bind_layer(params, kind)(x, rope, kv_cache), kv_cache.cache

    def _last(self, top: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        bound = self._decoder.bind_top(top)
        logits = bound.logits(bound.norm(x))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.isfinite(logits).all(axis=-1)


def greedy(
    rows: Rows,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    end_ids: frozenset[int],
    on_step: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The likeliest tokens after each prompt: `num_tokens`, or up to an end token (left out).

    Args:
        rows: as many as there are prompts, with `num_steps` positions, or more.
        on_step: called after each of `num_steps`, unless all have ended before.
    Raises: InvalidRequest for a prompt that is empty or too long; EngineFailure for NaN.
    """
    _check(prompts)
    padding = [0] * (rows.num_rows - len(prompts))
    total = num_steps(prompts, num_tokens)
    assert total <= rows.num_positions
    texts = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + num_tokens for prompt in prompts]  # where each text ends
    for at in range(total):
        fed = [text[at] if at < len(text) else 0 for text in texts]
        likeliest = rows.step(fed + padding, at)
        for row, text in enumerate(texts):
            if at + 1 != len(text) or len(text) == ends[row]:
                continue  # inside the prompt, or ended
            token = int(likeliest[row])
            if token in end_ids:
                ends[row] = len(text)
            else:
                text.append(token)
        on_step()
        if all(len(text) == end for text, end in zip(texts, ends, strict=True)):
            break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def num_steps(prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
    """Until the longest answer is there; its last token is not fed."""
    return max(map(len, prompts)) + num_tokens - 1


def _check(prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts, start=1):
        if not 1 <= len(prompt) <= MAX_PROMPT_TOKENS:
            raise InvalidRequest(
                f"prompt {number} has {len(prompt)} tokens; a comparison takes 1 to "
                f"{MAX_PROMPT_TOKENS}"
            )
