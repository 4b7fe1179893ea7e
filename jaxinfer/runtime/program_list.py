"""Every program of a decoder over its buckets, with its name and the shapes of its arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import numpy as np
from jax.stages import Lowered, Wrapped

from jaxinfer.config import MAX_LOGIT_BIAS
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.aot import Program
from jaxinfer.runtime.kv_cache import layer_shapes
from jaxinfer.runtime.penalties import PenaltyArrays
from jaxinfer.runtime.sampling import SamplingArrays, Variant
from jaxinfer.runtime.steps import DecodeArrays, PrefillArrays, Steps, without_layers
from jaxinfer.scheduling.buckets import Buckets
from pallas_kernels.query_blocks import QueryBlocks

Shape = jax.ShapeDtypeStruct
ArrayShapes = DecodeArrays[Shape] | PrefillArrays[Shape]
Lower = Callable[..., Lowered]
"""Takes a jitted function and the shapes of its arguments."""


def lower_here(function: Wrapped, *args: Any) -> Lowered:
    """For this process's own device."""
    return function.lower(*args)


def step_name(kind: str, bucket: int, part: str) -> str:
    """Part: begin, layer or end of a layered step, or `step` for a fused one."""
    return f"{kind} {'rows' if kind == 'decode' else 'tokens'}={bucket} {part}"


def layer_part(kind: int) -> str:
    """The name of the part that runs layers of this kind (`Decoder.layer_kinds`)."""
    return f"layer kind={kind}" if kind else "layer"


def sample_name(variant: str, rows: int) -> str:
    return f"sample rows={rows} {variant}"


class ProgramList:
    """Enumerates the programs.

    Args:
        pages_dtype: of keys and values; None: the decoder's.
        is_fused: one program per step; else begin, layer and end (jaxinfer/runtime/steps.py).
        lower: for which device.
    """

    def __init__(
        self,
        decoder: Decoder,
        steps: Steps,
        buckets: Buckets,
        *,
        num_pages: int,
        page_size: int,
        pages_dtype: np.dtype[Any] | None = None,
        is_fused: bool,
        lower: Lower = lower_here,
    ):
        self._steps, self._buckets, self._is_fused = steps, buckets, is_fused
        self._lower = lower
        self._compiler_options = decoder.arithmetic.backend.compiler_options
        layer = layer_shapes(
            decoder.config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=pages_dtype or decoder.dtype,
        )
        self._pages = [layer] * decoder.config.num_hidden_layers
        self._params, self._layer_kinds = decoder.param_shapes, decoder.layer_kinds
        self._top = without_layers(self._params)
        self._newest = _int32(buckets.max_rows)
        self._dim, self._dtype = decoder.config.hidden_size, decoder.dtype
        self._vocab_size = decoder.config.vocab_size

    def serving(self) -> list[Program]:
        """What an engine may call, the longest to compile first, so that all cores end together."""
        buckets = self._buckets
        programs: list[Program] = []
        for tokens in reversed(buckets.tokens):
            programs += self._step("prefill", tokens, self._prefill_arrays(tokens))
        for rows in reversed(buckets.rows):
            programs += self._step("decode", rows, self._decode_arrays(rows))
        programs += (self._sample(rows, v) for v in get_args(Variant) for rows in buckets.rows)
        return programs

    def batch_bytes(self) -> int:
        """Of the arrays that the largest step brings along, and of the masks that admit all."""
        buckets = self._buckets
        steps = self._prefill_arrays(buckets.max_tokens), self._decode_arrays(buckets.max_rows)
        masks = [self._penalty_arrays(rows).mask for rows in buckets.rows]
        penalties = self._penalty_arrays(buckets.max_rows)
        return max(map(_nbytes, steps)) + _nbytes(penalties) + _nbytes(masks)

    def score(self, tokens: int) -> list[Program]:
        """What `ModelRunner.score_chunk` calls for this bucket."""
        parts = list(self._parts("prefill", tokens, self._prefill_arrays(tokens)))
        x = Shape((tokens, self._dim), self._dtype)
        args = self._top, x, _int32(tokens)
        name = step_name("prefill", tokens, "score")
        return [*parts[:-1], self._program(name, self._steps.score, *args)]

    def _step(self, kind: str, bucket: int, arrays: ArrayShapes) -> list[Program]:
        if not self._is_fused:
            return list(self._parts(kind, bucket, arrays))
        args = self._params, self._pages, self._newest, arrays
        return [self._program(step_name(kind, bucket, "step"), self._steps.fused, *args)]

    def _parts(self, step: str, bucket: int, arrays: ArrayShapes) -> Iterator[Program]:
        """A layer of each kind, begin, end: of a layered step."""
        steps = self._steps
        x, rope = jax.eval_shape(steps.begin, self._top, self._newest, arrays)
        for kind, function in enumerate(steps.layers):
            i = self._layer_kinds.index(kind)
            args = self._params["layers"][i], self._pages[i], x, rope, arrays
            yield self._program(step_name(step, bucket, layer_part(kind)), function, *args)
        for part, function, args in (
            ("begin", steps.begin, (self._top, self._newest, arrays)),
            ("end", steps.end, (self._top, x, arrays)),
        ):
            yield self._program(step_name(step, bucket, part), function, *args)

    def _sample(self, rows: int, variant: Variant) -> Program:
        real = Shape((rows,), np.float32)
        seeds = Shape((rows, 2), np.uint32)
        arrays = SamplingArrays(real, _int32(rows), real, real, seeds, _int32(rows))
        hidden = Shape((self._buckets.max_rows, self._dim), self._dtype)
        args = self._top, hidden, self._newest, _int32(rows), arrays
        if variant == "penalized":
            args = *args, self._penalty_arrays(rows)
        return self._program(sample_name(variant, rows), self._steps.sample[variant], *args)

    def _program(self, name: str, function: Wrapped, *args: Any) -> Program:
        lower = functools.partial(self._lower, function, *args)
        return Program(name, lower, self._compiler_options)

    def _penalty_arrays(self, rows: int) -> PenaltyArrays[Shape]:
        number, real = _int32(rows), Shape((rows,), np.float32)
        return PenaltyArrays(
            history=_int32(rows, self._buckets.max_history),
            num_known=number,
            num_prompt=number,
            from_seat=number,
            repetition=real,
            presence=real,
            frequency=real,
            bias_ids=_int32(rows, MAX_LOGIT_BIAS),
            bias=Shape((rows, MAX_LOGIT_BIAS), np.float32),
            mask=_int32(rows, -(-self._vocab_size // 32)),
        )

    def _decode_arrays(self, rows: int) -> DecodeArrays[Shape]:
        table = _int32(rows, self._buckets.max_pages_per_seq)
        return DecodeArrays(_int32(rows), _int32(rows), _int32(rows), table)

    def _prefill_arrays(self, tokens: int) -> PrefillArrays[Shape]:
        buckets = self._buckets
        blocks = QueryBlocks(
            _int32(buckets.max_rows),
            _int32(),
            _int32(buckets.wide_blocks(tokens), buckets.block_q(tokens)),
            _int32(),
        )
        table = _int32(buckets.max_rows, buckets.max_pages_per_seq)
        axis = _int32(tokens)
        return PrefillArrays(axis, axis, axis, axis, table, blocks, _int32(buckets.max_rows))


def _nbytes(shapes: object) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def _int32(*shape: int) -> Shape:
    return Shape(shape, np.int32)
