"""The device half behind the engine's `Runner` protocol: batches in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.errors import PoolLost
from jaxinfer.runtime.aot import Programs
from jaxinfer.runtime.kv_cache import KVPages
from jaxinfer.runtime.penalties import PenaltyArrays
from jaxinfer.runtime.program_list import layer_part, sample_name, step_name
from jaxinfer.runtime.sampling import Sampled, SamplingArrays
from jaxinfer.runtime.steps import (
    DecodeArrays,
    Params,
    PrefillArrays,
    StepArrays,
    without_layers,
)
from jaxinfer.scheduling.batch import Batch, PenaltyBatch, SamplingBatch, StepResult
from pallas_kernels.query_blocks import QueryBlocks


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step on its way: arrays that the device is still filling."""

    sampled: Sampled[jax.Array]
    num_sampled: int


class ModelRunner:
    """Owns the parameters by version and the KV pool; calls finished executables only.

    Pages are donated to every program that writes them and rebound to what it returns. Steps run in
    the order in which they were dispatched, so one may be dispatched before the last is collected:
    the tokens that it continues are on the device, one for each seat.

    Args:
        layer_kinds: of each layer (`Decoder.layer_kinds`).
        num_seats: the largest row bucket.
        make_pages: makes pages like `pages`, when they are lost.
        vocab_size: of the model.
    """

    def __init__(
        self,
        params: Mapping[str, Params],
        pages: KVPages,
        programs: Programs,
        *,
        layer_kinds: Sequence[int],
        num_seats: int,
        make_pages: Callable[[], KVPages],
        vocab_size: int,
    ):
        self._params = dict(params)
        self._layer_kinds = tuple(layer_kinds)
        self._distinct_kinds = tuple(set(layer_kinds))
        self._num_seats = num_seats
        self._make_pages = make_pages
        self._newest = self._empty_seats()
        self._tops = {version: without_layers(tree) for version, tree in params.items()}
        self._weights_bytes = {version: _num_bytes(tree) for version, tree in params.items()}
        self._pages = list(pages)
        self._is_closed = False
        self._programs = programs
        self._num_mask_words = -(-vocab_size // 32)
        self._full_masks: dict[int, jax.Array] = {}  # by rows: of steps without a grammar

    def dispatch(self, batch: Batch) -> PendingStep:
        """Starts the step's programs and returns while the device works.

        Raises: PoolLost if the step failed and took donated pages with it.
        """
        with self._guarded():
            return self._dispatch(batch)

    def _dispatch(self, batch: Batch) -> PendingStep:
        arrays = jax.device_put(_step_arrays(batch))
        step = self._programs.get(step_name(batch.kind, batch.bucket, "step"))
        if step is not None:
            params = self._params[batch.version]
            self._pages, hidden = step(params, self._pages, self._newest, arrays)
        else:
            x = self._run_layers(batch.kind, batch.bucket, batch.version, arrays)
            end = self._programs[step_name(batch.kind, batch.bucket, "end")]
            hidden = end(self._tops[batch.version], x, arrays)
        sampling = batch.sampling
        sample = self._programs[sample_name(sampling.variant, len(sampling.temperature))]
        top, draws = self._tops[batch.version], _sampling_arrays(sampling)
        args = top, hidden, self._newest, sampling.seats, draws
        if sampling.penalties is not None:
            args = *args, _penalty_arrays(sampling.penalties, self._mask(sampling.penalties))
        sampled, self._newest = sample(*args)
        return PendingStep(sampled, batch.num_sampled)

    def _mask(self, penalties: PenaltyBatch) -> np.ndarray | jax.Array:
        if penalties.mask is not None:
            return penalties.mask
        num_rows = len(penalties.num_known)
        if num_rows not in self._full_masks:
            full = np.full((num_rows, self._num_mask_words), -1, np.int32)
            self._full_masks[num_rows] = jax.device_put(full)
        return self._full_masks[num_rows]

    def _run_layers(self, kind: str, bucket: int, version: str, arrays: StepArrays) -> jax.Array:
        """Begin and all layers of a layered step: float[T, E]."""
        begin = self._programs[step_name(kind, bucket, "begin")]
        x, rope = begin(self._tops[version], self._newest, arrays)
        by_kind = {
            own: self._programs[step_name(kind, bucket, layer_part(own))]
            for own in self._distinct_kinds
        }
        for i, params in enumerate(self._params[version]["layers"]):
            layer = by_kind[self._layer_kinds[i]]
            x, self._pages[i] = layer(params, self._pages[i], x, rope, arrays)
        return x

    def collect(self, pending: PendingStep) -> StepResult:
        """Waits for the step and fetches what it sampled, in one transfer. Raises: PoolLost."""
        n = pending.num_sampled
        with self._guarded():
            token_ids, logprobs, top_ids, top_logprobs = jax.device_get(pending.sampled)
        has_top = top_ids.shape[1] > 0
        return StepResult(
            token_ids=token_ids[:n],
            logprobs=logprobs[:n],
            top_ids=top_ids[:n] if has_top else None,
            top_logprobs=top_logprobs[:n] if has_top else None,
        )

    @contextmanager
    def _guarded(self) -> Generator[None]:
        """An error after pages were donated, or in a program that writes them, is PoolLost."""
        try:
            yield
        except Exception as error:
            if self._has_pages():
                raise
            raise PoolLost(f"a step failed and took the KV pool with it: {error}") from error

    def rebuild(self) -> None:
        """Drops the pages, when no step writes them any more, and makes them anew, and the seats.

        Raises: what the device raises; the pages are lost then.
        """
        lost, self._pages = self._pages, []
        with suppress(Exception):  # of the step that broke them
            jax.block_until_ready(lost)
        _delete(lost)
        self._pages = list(jax.block_until_ready(self._make_pages()))
        self._newest = self._empty_seats()

    def _empty_seats(self) -> jax.Array:
        return jax.device_put(np.zeros(self._num_seats, np.int32))

    def _has_pages(self) -> bool:
        if not self._pages:
            return False
        try:
            jax.block_until_ready((self._pages, self._newest))
        except Exception:  # of the programs that should have written them
            return False
        return not any(array.is_deleted() for array in jax.tree.leaves(self._pages))

    def params(self, version: str) -> Params:
        """What it computes with under this name."""
        return self._params[version]

    def add_version(self, version: str, params: Params) -> None:
        """Parameters of the same tree, shapes and dtypes as the programs were made for.

        In place of those that it has under this name, if there are any; these are freed when the
        steps under way have ended.
        """
        before = self._params.get(version)
        self._params[version] = params
        self._weights_bytes[version] = _num_bytes(params)
        self._tops[version] = without_layers(params)
        if before is not None:
            _delete(before)

    def take_version(self, version: str) -> Params:
        """Its parameters, now the caller's, to be replaced one by one. Until `add_version` gives it
        others, or `drop_version` lets it go, no step can be of this version.
        """
        params, self._params[version] = self._params[version], {}
        self._tops[version] = {}
        return params

    @property
    def versions(self) -> tuple[str, ...]:
        """Those that it has. Any thread may ask."""
        return tuple(self._params)

    @property
    def weights_bytes(self) -> int:
        """Of the parameters of all versions. Any thread may ask."""
        return sum(list(self._weights_bytes.values()))

    def drop_version(self, version: str) -> None:
        """Frees the parameters of a version, though others may refer to them."""
        del self._tops[version], self._weights_bytes[version]
        _delete(self._params.pop(version))

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Frees everything on the device, and the programs, when steps under way have ended. No
        step can run any more. May be called twice.
        """
        with suppress(Exception):  # of a step that failed
            jax.block_until_ready((self._pages, self._newest))
        for version in list(self._params):
            self.drop_version(version)
        held = self._pages, self._newest, self._full_masks
        self._pages, self._full_masks = [], {}
        _delete(held)
        self._programs = Programs({}, 0, 0, 0.0)
        self._is_closed = True
        self._make_pages = _closed

    def score_chunk(
        self, version: str, bucket: int, arrays: PrefillArrays[np.ndarray], targets: np.ndarray
    ) -> np.ndarray:
        """Runs one chunk of a known text.

        Returns: float32[T], the log-probability of targets int32[T] after each token.
        """
        x = self._run_layers("prefill", bucket, version, jax.device_put(arrays))
        score = self._programs[step_name("prefill", bucket, "score")]
        return jax.device_get(score(self._tops[version], x, targets))

    def add_programs(self, programs: Programs) -> None:
        """More executables, e.g. those of scoring."""
        self._programs = self._programs.merged(programs)


def _num_bytes(params: Params) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(params))


def _delete(arrays: Any) -> None:
    """All of a tree."""
    for array in jax.tree.leaves(arrays):
        array.delete()


def _step_arrays(batch: Batch) -> DecodeArrays[np.ndarray] | PrefillArrays[np.ndarray]:
    if batch.blocks is None:
        return DecodeArrays(batch.token_ids, batch.from_seat, batch.positions, batch.page_table)
    blocks = batch.blocks
    return PrefillArrays(
        batch.token_ids,
        batch.from_seat,
        batch.positions,
        batch.rows,
        batch.page_table,
        QueryBlocks(blocks.narrow, blocks.num_narrow, blocks.wide, blocks.num_wide),
        batch.sample_at,
    )


def _sampling_arrays(sampling: SamplingBatch) -> SamplingArrays[np.ndarray]:
    return SamplingArrays(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        sampling.positions,
    )


def _penalty_arrays(
    penalties: PenaltyBatch, mask: np.ndarray | jax.Array
) -> PenaltyArrays[np.ndarray | jax.Array]:
    return PenaltyArrays(
        penalties.history,
        penalties.num_known,
        penalties.num_prompt,
        penalties.from_seat,
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
        penalties.bias_ids,
        penalties.bias,
        mask,
    )


def _closed() -> KVPages:
    raise RuntimeError("the runner is closed")
