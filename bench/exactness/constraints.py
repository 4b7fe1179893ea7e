"""What exactness costs: the engine's smallest decode step beside smaller ones.

A decode step always computes MIN_ROWS rows, since a row has other bits in a smaller one. Here the
same layers are compiled for exactly 1, 2, 4 and 7 rows, too, and timed in turns. Attention takes
its rows in groups of eight in all of them, so the difference is that of everything else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.workloads import Figures
from checkpoints.checkpoint import open_checkpoint
from checkpoints.resolve import resolve
from jaxinfer.config import MIN_ROWS
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.kv_cache import KVPages, LayerPages, PagedKV, make_pages
from jaxinfer.runtime.memory_plan import default_dtype
from jaxinfer.runtime.weights import load_weights
from pallas_kernels.attention_reference import HEAD_MULTIPLE
from pallas_kernels.backend import REFERENCE
from pallas_kernels.query_blocks import NARROW_GROUP
from pallas_kernels.row_sum import SAME_ORDER_FROM

ROWS = (1, 2, 4, 7, MIN_ROWS)
CONTEXT = 128  # tokens of every row
PAGE_SIZE = 64
NUM_WARM = 2  # steps that are not timed
NUM_TIMED = 5  # steps per repetition and number of rows, of which the median is taken


def metric(rows: int) -> str:
    return f"decode_{rows}_rows_s"


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder and its parameters."""

    decoder: Decoder
    params: dict[str, Any]


def load(model: str, cache_dir: Any) -> Model:
    """Raises: CheckpointError, ConfigError."""
    checkpoint = open_checkpoint(resolve(model, cache_dir=cache_dir, show_progress=False))
    try:
        decoder = decoder_for(checkpoint.config, dtype=default_dtype("auto"))
        return Model(decoder, load_weights(checkpoint, decoder, show_progress=False))
    finally:
        checkpoint.close()


class FewRows:
    """A KVCache for a decode step of any number of rows: those of attention are padded."""

    def __init__(self, pages: LayerPages[jax.Array], table: jax.Array, positions: jax.Array):
        self._num_rows = positions.shape[0]
        self._extra = -self._num_rows % NARROW_GROUP
        positions = jnp.pad(positions, (0, self._extra), constant_values=-1)
        table = jnp.pad(table, ((0, self._extra), (0, 0)))
        self._inner = PagedKV(pages, table, positions, None, None, backend=REFERENCE)

    @property
    def pages(self) -> LayerPages[jax.Array]:
        return self._inner.pages

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
        q, k, v = (jnp.pad(x, ((0, self._extra), (0, 0), (0, 0))) for x in (q, k, v))
        out = self._inner.attend(q, k, v, scale=scale, window=window, soft_cap=soft_cap)
        return out[: self._num_rows]


class DecodeSteps:
    """Decode steps of `model` with as many rows as are asked for, each with its own page."""

    def __init__(self, model: Model):
        decoder = model.decoder
        self._model = model
        self._top = {name: tree for name, tree in model.params.items() if name != "layers"}
        per_row = CONTEXT // PAGE_SIZE
        self._table = np.arange(MIN_ROWS * per_row, dtype=np.int32).reshape(MIN_ROWS, per_row)
        self._pages: KVPages = make_pages(
            decoder.config,
            num_pages=MIN_ROWS * per_row,
            page_size=PAGE_SIZE,
            dtype=decoder.dtype,
        )
        self._begin = jax.jit(self._begin_step)
        self._layer = jax.jit(
            self._layer_step, static_argnames="kind", donate_argnames=("pages", "x")
        )
        self._end = jax.jit(self._end_step)

    def __call__(self, num_rows: int) -> np.ndarray:
        """float32[num_rows, V]: the logits, when they are there."""
        token_ids = np.arange(num_rows, dtype=np.int32)
        positions = np.full(num_rows, CONTEXT - 1, np.int32)
        x, rope = self._begin(self._top, token_ids, positions)
        table = self._table[:num_rows]
        kinds = self._model.decoder.layer_kinds
        for i, params in enumerate(self._model.params["layers"]):
            x, self._pages[i] = self._layer(
                params, self._pages[i], x, rope, table, positions, kind=kinds[i]
            )
        return np.asarray(self._end(self._top, x))

    def _begin_step(self, top: Any, token_ids: jax.Array, positions: jax.Array) -> Any:
        return self._model.decoder.bind_top(top).begin(token_ids, positions)

    def _layer_step(
        self,
        params: Any,
        pages: Any,
        x: jax.Array,
        rope: Any,
        table: jax.Array,
        at: jax.Array,
        *,
        kind: int,
    ) -> Any:
        kv_cache = FewRows(pages, table, at)
        x = self._model.decoder.bind_layer(params, kind)(x, rope, kv_cache)
        return x, kv_cache.pages

    def _end_step(self, top: Any, x: jax.Array) -> jax.Array:
        bound = self._model.decoder.bind_top(top)
        return bound.logits(bound.norm(x))


def time_rows(
    steps: DecodeSteps, clock: Callable[[], float], rows: Sequence[int] = ROWS
) -> Figures:
    """Seconds of a decode step for each number of rows, taken in turns."""
    seconds: dict[int, list[float]] = {number: [] for number in rows}
    for _ in range(NUM_WARM + NUM_TIMED):
        for number, spent in seconds.items():
            start = clock()
            steps(number)
            spent.append(clock() - start)
    return {
        metric(number): statistics.median(spent[NUM_WARM:]) for number, spent in seconds.items()
    }


def inexact_rows(steps: DecodeSteps, rows: Sequence[int] = ROWS) -> list[int]:
    """The numbers of rows whose first row has other bits than in a step of MIN_ROWS."""
    want = steps(MIN_ROWS)[0].tobytes()
    return [number for number in rows if steps(number)[0].tobytes() != want]


def explain(decoder: Decoder, inexact: list[int]) -> Iterator[str]:
    """One line per constraint: what is compared, or why there is nothing to compare."""
    config = decoder.config
    found = ", ".join(map(str, inexact)) or "none"
    yield (
        f"rows: a step of {MIN_ROWS} rows is the smallest that the engine has; each of the others "
        f"is the same layers compiled for exactly that many rows. Other bits than with {MIN_ROWS} "
        f"on this machine: {found}."
    )
    padded = math.ceil(config.head_dim / HEAD_MULTIPLE) * HEAD_MULTIPLE
    yield (
        f"heads: {config.head_dim} is padded to {padded} in attention's two products, "
        f"{padded / config.head_dim:.2f} times their work."
        if padded != config.head_dim
        else f"heads: {config.head_dim} is a multiple of {HEAD_MULTIPLE}; nothing is padded, so "
        "there is nothing to compare."
    )
    is_folded = config.hidden_size * MIN_ROWS < SAME_ORDER_FROM
    yield (
        f"norms: sums over {config.hidden_size} are "
        + ("folded by halves" if is_folded else "the compiler's own, as without the constraint")
        + f" ({MIN_ROWS} rows hold {'fewer' if is_folded else 'no fewer'} than "
        f"{SAME_ORDER_FROM} elements)."
    )
