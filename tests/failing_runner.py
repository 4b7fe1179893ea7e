"""A runner that fails where it is told to, and leaves what a failed step leaves: anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.errors import PoolLost
from jaxinfer.scheduling.batch import Batch, StepResult
from tests.fakes import FakeRunner

ANYTHING = -7
Failing = Callable[[str, int, Batch], Exception | None]
"""("dispatch" or "collect", number of the step, the step) -> what it raises; asked at dispatch."""


class FailingRunner(FakeRunner):
    """After PoolLost no step runs until the pool was made anew. What is computed from what a failed
    step wrote is not a number.
    """

    def __init__(self, failing: Failing, num_pages: int = 64, page_size: int = 8):
        super().__init__(num_pages, page_size, poison=frozenset({ANYTHING}))
        self._failing = failing
        self._has_pages = True

    def dispatch(self, batch: Batch) -> Any:
        number = len(self.batches)
        if not self._has_pages:
            raise PoolLost("the pool is still lost")
        pending = super().dispatch(batch)
        error = self._failing("dispatch", number, batch)
        late = error or self._failing("collect", number, batch)
        if late is not None:
            self._spoil(batch)
        if error is not None:
            raise self._noted(error)
        return pending, late

    def collect(self, pending: Any) -> StepResult:
        inner, error = pending
        if error is not None:
            raise self._noted(error)
        return super().collect(inner)

    def rebuild(self) -> None:
        super().rebuild()
        self._has_pages = True

    def _noted(self, error: Exception) -> Exception:
        self._has_pages = self._has_pages and not isinstance(error, PoolLost)
        return error

    def _spoil(self, batch: Batch) -> None:
        """What the step wrote is anything, and so are the tokens that it drew."""
        real = np.flatnonzero(batch.positions >= 0)
        places = batch.positions[real]
        pages = batch.page_table[batch.rows[real], places // self.page_size]
        self._tokens[pages, places % self.page_size] = ANYTHING
        self._positions[pages, places % self.page_size] = ANYTHING
        for seat in batch.sampling.seats[: batch.num_sampled].tolist():
            self._newest[seat] = ANYTHING
