"""A step while the scheduler puts it together, and when it is ready to be dispatched.

Host only: no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One step. `update` takes from here what was scheduled, not from what is known by then."""

    batch: Batch
    sequences: list[Sequence]  # in the order of the batch's rows
    num_new: list[int]  # tokens each of them computes
    sampled: list[Sequence]  # in the order of the result


class StepDraft:
    """A step while it is put together."""

    __slots__ = ("budget", "has_chunks", "num_new", "sequences")

    def __init__(self, budget: int):
        self.budget = budget  # tokens left for chunks
        self.has_chunks = False  # something is behind by more than one token
        self.sequences: list[Sequence] = []
        self.num_new: list[int] = []
