"""The jitted programs, and nothing else jitted.

prefill_step and decode_step run the layers and leave hidden states; sample_step applies the head
and draws. They are separate programs so that their shapes add up instead of multiplying: (token
buckets + row buckets) of the layers, plus (row buckets x sampler variants) of the head, which takes
as many rows as are really sampled.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models.registry import Decoder
from jaxinfer.runtime.kv_cache import KVPages, PagedKV
from jaxinfer.runtime.sampling import Sampled, SamplingArrays, Variant, sample
from pallas_kernels.backend import Backend
from pallas_kernels.paged_attention import QueryBlocks

Params = dict[str, Any]


class DecodeArrays(NamedTuple):
    """A decode step's batch: one token per row."""

    token_ids: jax.Array  # int32[N]
    positions: jax.Array  # int32[N]; -1 marks padding
    page_table: jax.Array  # int32[N, M]


class PrefillArrays(NamedTuple):
    """A prefill step's batch: packed chunks."""

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T]; -1 marks padding
    rows: jax.Array  # int32[T]
    page_table: jax.Array  # int32[R, M]
    blocks: QueryBlocks
    sample_at: jax.Array  # int32[R]


class Steps:
    """The programs of one decoder, to be lowered for each bucket (jaxinfer/runtime/aot.py).

    Hidden states are always float[R, E], R the largest row bucket, whatever step they come from.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int, backend: Backend):
        self._decoder, self._max_rows, self._backend = decoder, max_rows, backend
        self.prefill = jax.jit(self._prefill, donate_argnames="pages")
        self.decode = jax.jit(self._decode, donate_argnames="pages")
        self.sample = {
            variant: jax.jit(partial(self._sample, variant=variant))
            for variant in ("greedy", "plain", "full")
        }
        self.score = jax.jit(self._score, donate_argnames="pages")

    def _prefill(
        self, params: Params, pages: KVPages, batch: PrefillArrays
    ) -> tuple[KVPages, jax.Array]:
        hidden, pages = self._forward(params, pages, batch)
        return pages, hidden[batch.sample_at]

    def _decode(
        self, params: Params, pages: KVPages, batch: DecodeArrays
    ) -> tuple[KVPages, jax.Array]:
        num_rows = batch.token_ids.shape[0]
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        kv_cache = PagedKV(
            pages, batch.page_table, batch.positions, rows, None, backend=self._backend
        )
        model = self._decoder.bind(params)
        hidden = model(batch.token_ids, jnp.maximum(batch.positions, 0), kv_cache)
        return kv_cache.pages, jnp.pad(hidden, ((0, self._max_rows - num_rows), (0, 0)))

    def _sample(
        self, params: Params, hidden: jax.Array, arrays: SamplingArrays, *, variant: Variant
    ) -> Sampled:
        num_rows = arrays.temperature.shape[0]
        logits = self._decoder.bind(params).logits(hidden[:num_rows])
        with jax.named_scope("sample"):
            return sample(logits, arrays, variant)

    def _score(
        self, params: Params, pages: KVPages, batch: PrefillArrays, targets: jax.Array
    ) -> tuple[KVPages, jax.Array]:
        """A prefill step that scores a known text.

        Returns: float32[T], the log-probability of targets int32[T] after each token.
        """
        hidden, pages = self._forward(params, pages, batch)
        logits = self._decoder.bind(params).logits(hidden)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return pages, chosen - jax.nn.logsumexp(logits, axis=-1)

    def _forward(
        self, params: Params, pages: KVPages, batch: PrefillArrays
    ) -> tuple[jax.Array, KVPages]:
        kv_cache = PagedKV(
            pages,
            batch.page_table,
            batch.positions,
            batch.rows,
            batch.blocks,
            backend=self._backend,
        )
        model = self._decoder.bind(params)
        hidden = model(batch.token_ids, jnp.maximum(batch.positions, 0), kv_cache)
        return hidden, kv_cache.pages
