"""What has happened in an engine and no call of `step` has told yet.

Host only: no JAX.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxinfer.outputs import EngineStep, RequestOutput
from jaxinfer.stats import StepStats


class Untold:
    """Nothing, at first."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self._failed_versions: list[str] = []
        self._num_retried = 0
        self._rebuild_s: float | None = None

    def note_failure(self, versions: Iterable[str], num_retried: int) -> None:
        """Of a step, or of the pool; so many sequences begin again."""
        self._failed_versions += versions
        self._num_retried += num_retried

    def note_rebuild(self, seconds: float) -> None:
        """Scheduler and pool were made anew."""
        self._rebuild_s = (self._rebuild_s or 0.0) + seconds

    def tell(self, stats: StepStats | None) -> EngineStep:
        """All of it, once, with the stats of the step that was read."""
        told = EngineStep(
            tuple(self.outputs),
            stats,
            tuple(self._failed_versions),
            self._num_retried,
            self._rebuild_s,
        )
        self.outputs = []
        self._failed_versions, self._num_retried, self._rebuild_s = [], 0, None
        return told
