"""The jitted programs; nothing else is jitted but the zeros of the pool (kv_cache.py).

A step is begin (embedding, rotary tables), the layers one after the other, and end (last norm, the
rows to sample); sampling applies the head and draws. Two ways to run the layers:

layered: one program per shape serves all layers, called once per layer with that layer's weights
    and pages. It compiles in a second and loads in milliseconds, whatever the number of layers.
fused: the whole step is one program with its layers unrolled. Seconds to compile and to load, but
    one launch: on a GPU one CUDA graph.

Sampling is a program of its own in both, so that shapes add up instead of multiplying: buckets of
the layers, plus (row buckets x sampler variants) of the head, which takes as many rows as are
really sampled.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.kv_cache import KVPages, LayerPages, PagedKV
from jaxinfer.runtime.penalties import PenaltyArrays, penalized
from jaxinfer.runtime.sampling import Sampled, SamplingArrays, Variant, log_total, sample
from pallas_kernels.query_blocks import Array, QueryBlocks

Params = dict[str, Any]


class DecodeArrays(NamedTuple, Generic[Array]):
    """A decode step's batch: one token per row."""

    token_ids: Array  # int32[N]
    from_seat: Array  # int32[N]; -1: the id is in token_ids, else in `newest` at this place
    positions: Array  # int32[N]; -1 marks padding
    page_table: Array  # int32[N, M]


class PrefillArrays(NamedTuple, Generic[Array]):
    """A prefill step's batch: packed chunks."""

    token_ids: Array  # int32[T]
    from_seat: Array  # int32[T]; as in DecodeArrays
    positions: Array  # int32[T]; -1 marks padding
    rows: Array  # int32[T]
    page_table: Array  # int32[R, M]
    blocks: QueryBlocks[Array]
    sample_at: Array  # int32[R]


StepArrays = DecodeArrays[jax.Array] | PrefillArrays[jax.Array]
Rope = Any  # the rotary tables of a step, as the family's layers take them


class Steps:
    """The programs of one decoder, to be lowered for each bucket (jaxinfer/runtime/aot.py).

    `params` is the whole tree, `top` the tree without its layers. Hidden states that are to be
    sampled are always float[R, E], R the largest row bucket, whatever step they come from.
    `newest` is int32[R], the last token drawn in each seat: a step reads its input tokens from
    there, so that it can start before anybody on the host knows them.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int):
        self._decoder, self._max_rows = decoder, max_rows
        self._backend = decoder.arithmetic.backend
        self.begin = jax.jit(self._begin)
        kinds = [partial(self._layer, kind=kind) for kind in range(len(decoder.layers))]
        self.layers = [jax.jit(layer, donate_argnames=("pages", "x")) for layer in kinds]
        self.end = jax.jit(self._end)
        # In a fused step each kind is traced once, and XLA unrolls the calls.
        self._traced_once = [jax.jit(layer) for layer in kinds]
        self.fused = jax.jit(self._fused, donate_argnames="pages")
        self.sample = {
            variant: jax.jit(partial(self._sample, variant=variant))
            for variant in get_args(Variant)
        }
        self.score = jax.jit(self._score)

    def _begin(self, top: Params, newest: jax.Array, batch: StepArrays) -> tuple[jax.Array, Rope]:
        """float[T, E] and the rotary tables of its positions."""
        seats = batch.from_seat
        token_ids = jnp.where(seats >= 0, newest[jnp.maximum(seats, 0)], batch.token_ids)
        positions = jnp.maximum(batch.positions, 0)
        return self._decoder.bind_top(top).begin(token_ids, positions)

    def _layer(
        self,
        params: Params,
        pages: LayerPages[jax.Array],
        x: jax.Array,
        rope: Rope,
        batch: StepArrays,
        *,
        kind: int = 0,
    ) -> tuple[jax.Array, LayerPages[jax.Array]]:
        """One layer of a kind (`Decoder.layer_kinds`), on its own keys and values."""
        rows, blocks = None, None
        if isinstance(batch, PrefillArrays):
            rows, blocks = batch.rows, batch.blocks
        kv_cache = PagedKV(
            pages, batch.page_table, batch.positions, rows, blocks, backend=self._backend
        )
        x = self._decoder.bind_layer(params, kind)(x, rope, kv_cache)
        return x, kv_cache.pages

    def _end(self, top: Params, x: jax.Array, batch: StepArrays) -> jax.Array:
        """The rows to sample: float[R, E]."""
        x = self._decoder.bind_top(top).norm(x)
        if isinstance(batch, PrefillArrays):
            return x[batch.sample_at]
        return jnp.pad(x, ((0, self._max_rows - x.shape[0]), (0, 0)))

    def _fused(
        self, params: Params, pages: KVPages, newest: jax.Array, batch: StepArrays
    ) -> tuple[KVPages, jax.Array]:
        """All of a step."""
        x, rope = self._begin(params, newest, batch)
        new_pages = []
        kinds = self._decoder.layer_kinds
        for layer, kind, layer_pages in zip(params["layers"], kinds, pages, strict=True):
            x, layer_pages = self._traced_once[kind](layer, layer_pages, x, rope, batch)
            new_pages.append(layer_pages)
        return new_pages, self._end(params, x, batch)

    def _sample(
        self,
        top: Params,
        hidden: jax.Array,
        newest: jax.Array,
        seats: jax.Array,
        arrays: SamplingArrays[jax.Array],
        penalties: PenaltyArrays[jax.Array] | None = None,
        *,
        variant: Variant,
    ) -> tuple[Sampled[jax.Array], jax.Array]:
        """What was drawn, and `newest` with it at int32[N] seats; padding is past the last seat.

        `penalties` come with variant `penalized` only.
        """
        num_rows = arrays.temperature.shape[0]
        logits = self._decoder.bind_top(top).logits(hidden[:num_rows])
        with jax.named_scope("sample"):
            adjusted = None if penalties is None else penalized(logits, penalties, newest)
            sampled = sample(logits, arrays, variant, adjusted, backend=self._backend)
        return sampled, newest.at[seats].set(sampled.token_ids, mode="drop")

    def _score(self, top: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        """After the layers: float32[T], log-probability of targets int32[T] after each token."""
        model = self._decoder.bind_top(top)
        logits = model.logits(model.norm(x))
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return chosen - log_total(logits, self._backend)


def without_layers(params: Params) -> Params:
    """The `top` of a parameter tree."""
    return {name: value for name, value in params.items() if name != "layers"}
