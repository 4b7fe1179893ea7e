"""Every program of a decoder over its buckets, with its name and the shapes of its arguments."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxinfer.models.registry import Decoder
from jaxinfer.runtime.aot import Program
from jaxinfer.runtime.kv_cache import page_shape
from jaxinfer.runtime.sampling import SamplingArrays
from jaxinfer.runtime.steps import DecodeArrays, PrefillArrays, Steps
from jaxinfer.scheduling.buckets import Buckets
from pallas_kernels.paged_attention import QueryBlocks

VARIANTS = ("greedy", "plain", "full")


def step_name(kind: str, bucket: int) -> str:
    return f"{kind} {'rows' if kind == 'decode' else 'tokens'}={bucket}"


def sample_name(variant: str, rows: int) -> str:
    return f"sample {variant} rows={rows}"


class ProgramList:
    """Enumerates every program of a decoder over its buckets, with the shapes of its arguments."""

    def __init__(
        self,
        decoder: Decoder,
        steps: Steps,
        buckets: Buckets,
        *,
        num_pages: int,
        page_size: int,
    ):
        self._steps, self._buckets = steps, buckets
        shape = page_shape(decoder.config, num_pages=num_pages, page_size=page_size)
        page = jax.ShapeDtypeStruct(shape, decoder.dtype)
        self._pages = [(page, page)] * decoder.config.num_hidden_layers
        self._params = _as_loaded(decoder.param_shapes)
        self._hidden = jax.ShapeDtypeStruct(
            (buckets.max_rows, decoder.config.hidden_size), decoder.dtype
        )

    def serving(self) -> list[Program]:
        """What an engine may call, largest layers first so that the cores stay busy to the end."""
        buckets = self._buckets
        return [
            *(self._prefill(tokens) for tokens in reversed(buckets.tokens)),
            *(self._decode(rows) for rows in reversed(buckets.rows)),
            *(self._sample(rows, v) for rows in reversed(buckets.rows) for v in VARIANTS),
        ]

    def score(self, tokens: int) -> Program:
        """What `ModelRunner.score_chunk` calls for this bucket."""
        arrays = self._prefill_arrays(tokens)
        return Program(
            f"score tokens={tokens}",
            lambda: self._steps.score.lower(self._params, self._pages, arrays, _int32(tokens)),
        )

    def _prefill(self, tokens: int) -> Program:
        arrays = self._prefill_arrays(tokens)
        return Program(
            step_name("prefill", tokens),
            lambda: self._steps.prefill.lower(self._params, self._pages, arrays),
        )

    def _decode(self, rows: int) -> Program:
        table = _int32(rows, self._buckets.max_pages_per_seq)
        arrays = DecodeArrays(_int32(rows), _int32(rows), table)
        return Program(
            step_name("decode", rows),
            lambda: self._steps.decode.lower(self._params, self._pages, arrays),
        )

    def _sample(self, rows: int, variant: str) -> Program:
        real = jax.ShapeDtypeStruct((rows,), np.float32)
        seeds = jax.ShapeDtypeStruct((rows, 2), np.uint32)
        arrays = SamplingArrays(real, _int32(rows), real, real, seeds, _int32(rows))
        return Program(
            sample_name(variant, rows),
            lambda: self._steps.sample[variant].lower(self._params, self._hidden, arrays),
        )

    def _prefill_arrays(self, tokens: int) -> PrefillArrays:
        buckets = self._buckets
        blocks = QueryBlocks(
            _int32(buckets.max_rows),
            _int32(),
            _int32(buckets.wide_blocks(tokens), buckets.block_q(tokens)),
            _int32(),
        )
        table = _int32(buckets.max_rows, buckets.max_pages_per_seq)
        return PrefillArrays(
            _int32(tokens), _int32(tokens), _int32(tokens), table, blocks, _int32(buckets.max_rows)
        )


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def _as_loaded(tree: Any) -> Any:
    """Int-keyed dicts, as Flax spells lists, become the lists that loading gives."""
    if not isinstance(tree, dict):
        return tree
    if all(isinstance(key, int) for key in tree):
        return [_as_loaded(tree[key]) for key in sorted(tree)]
    return {key: _as_loaded(value) for key, value in tree.items()}
