"""A step while the scheduler puts it together, and when it is on its way.

Host only: no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxinfer.scheduling.batch import Batch, Int32
from jaxinfer.scheduling.running_table import Seats
from jaxinfer.scheduling.sequence import Sequence

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Rows:
    """The sequences of a step, in the order of the batch's rows, as columns."""

    seats: Seats
    num_new: Int32  # tokens that each of them computes
    sampled: Places  # rows whose next token is drawn, in the order of the result
    fresh: Places  # of the sampled: those that have drawn nothing yet in their seats


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """One step. `update` takes from here what was scheduled, not from what is known by then."""

    batch: Batch
    rows: Rows
    sequences: list[Sequence]  # in the order of the rows
    sampled: list[Sequence]  # in the order of the result
    sittings: npt.NDArray[np.int64]  # of the rows: whoever stands up meanwhile has lost its pages
    filling: frozenset[bytes]  # digests of pages that its chunks fill
    firsts: tuple[Sequence, ...]  # of the sampled: those whose first token it may draw


class StepDraft:
    """A step while it is put together: sequences that go on by a token, then others."""

    __slots__ = (
        "budget",
        "decoding",
        "far",
        "filling",
        "gave_way",
        "has_chunks",
        "held",
        "is_closed",
        "num_new",
        "others",
        "version",
    )

    def __init__(self, budget: int, version: str):
        self.budget = budget  # tokens left for chunks
        self.version = version  # of the weights, for every row
        self.decoding: Seats = np.empty(0, np.intp)  # running, and behind by one token
        self.far: list[Sequence] = []  # running, and behind by more; best rank first
        self.others: list[Sequence] = []  # running with more to compute, or just started
        self.num_new: list[int] = []  # tokens that each of the others computes
        self.has_chunks = False  # one of the others is behind by more than one token
        self.filling: set[bytes] = set()  # digests of pages that this step fills
        self.held: list[Sequence] = []  # taken out of the waiting until the step is complete
        self.gave_way: list[Sequence] = []  # preempted in this step
        self.is_closed = False  # nobody more starts in this step

    @property
    def is_empty(self) -> bool:
        return not self.others and not len(self.decoding)

    def drop(self, sequence: Sequence) -> None:
        """Takes one out that is behind by one token, whether or not it would have gone on."""
        self.decoding = self.decoding[self.decoding != sequence.seat]
        self.budget += 1
