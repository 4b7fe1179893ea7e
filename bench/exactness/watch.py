"""A runner that passes every step on and keeps what was in it: the proof of a circumstance.

Knows the engine's `Runner` protocol and its batches.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from jaxinfer.engine import Runner
from jaxinfer.scheduling.batch import Batch, StepResult


class Sampled(NamedTuple):
    """A sequence that drew a token in a step."""

    seed: int  # the 64 bits of its choice
    row: int  # of the page table; in a decode step its row of the batch
    position: int  # of the token that was drawn: as many were there before
    num_new: int  # tokens that the step computed of it
    pages: tuple[int, ...]  # of all its tokens


class Step(NamedTuple):
    """What was dispatched."""

    kind: Literal["prefill", "decode"]
    version: str  # of the weights
    bucket: int
    num_new: tuple[int, ...]  # tokens computed per sequence
    sampled: tuple[Sampled, ...]


class Watch:
    """Stands before `runner`."""

    def __init__(self, runner: Runner, page_size: int):
        self.steps: list[Step] = []
        self._runner = runner
        self._page_size = page_size

    def dispatch(self, batch: Batch) -> Any:
        self.steps.append(_seen(batch, self._page_size))
        return self._runner.dispatch(batch)

    def collect(self, pending: Any) -> StepResult:
        return self._runner.collect(pending)

    def rebuild(self) -> None:
        self._runner.rebuild()

    def drop_version(self, version: str) -> None:
        self._runner.drop_version(version)


def _seen(batch: Batch, page_size: int) -> Step:
    num_new = np.bincount(batch.rows[: batch.num_tokens], minlength=batch.num_seqs).tolist()
    rows = batch.rows[batch.sample_at[: batch.num_sampled]].tolist()
    positions = batch.sampling.positions[: batch.num_sampled].tolist()
    seeds = batch.sampling.seeds[: batch.num_sampled].tolist()
    sampled = tuple(
        Sampled(
            low | high << 32,
            row,
            position,
            num_new[row],
            tuple(batch.page_table[row, : -(-position // page_size)].tolist()),
        )
        for row, position, (low, high) in zip(rows, positions, seeds, strict=True)
    )
    return Step(batch.kind, batch.version, batch.bucket, tuple(num_new), sampled)
