"""A step while the scheduler puts it together, and when it is on its way.

Host only: no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """One step. `update` takes from here what was scheduled, not from what is known by then."""

    batch: Batch
    sequences: list[Sequence]  # in the order of the batch's rows
    num_new: list[int]  # tokens each of them computes
    sampled: list[Sequence]  # in the order of the result
    filling: frozenset[bytes] = frozenset()  # digests of pages that its chunks fill
    firsts: tuple[Sequence, ...] = ()  # of the sampled: those whose first token it draws
    gone: set[Sequence] = field(default_factory=set[Sequence])
    """Sequences that gave their pages back since: what the step computes of them is nobody's."""


class StepDraft:
    """A step while it is put together."""

    __slots__ = ("budget", "filling", "has_chunks", "num_new", "sequences", "version")

    def __init__(self, budget: int, version: str):
        self.budget = budget  # tokens left for chunks
        self.version = version  # of the weights, for every row
        self.has_chunks = False  # something is behind by more than one token
        self.filling: set[bytes] = set()  # digests of pages that its chunks fill
        self.sequences: list[Sequence] = []
        self.num_new: list[int] = []
