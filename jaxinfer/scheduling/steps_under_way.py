"""Steps that were scheduled and have not been read, and what reading them changes.

Host only: no JAX. Steps run, and are read, in the order in which they were scheduled.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.running_table import Flags, RunningTable
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.sequence import Sequence, Status


class StepsUnderWay:
    """Oldest first; one or two of them."""

    def __init__(self, pool: PagePool, table: RunningTable):
        self._pool, self._table = pool, table
        self._steps: deque[Scheduled] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, scheduled: Scheduled) -> None:
        """Counts on what the step will do."""
        rows = scheduled.rows
        self._table.num_scheduled[rows.seats] += rows.num_new
        self._table.has_drawn[rows.seats[rows.sampled]] = True
        self._steps.append(scheduled)

    def is_filling(self, digest: bytes | None) -> bool:
        """Whether one of the steps fills the page of this digest."""
        return any(digest in step.filling for step in self._steps)

    def read(self, scheduled: Scheduled, result: StepResult, now: float) -> list[Sequence]:
        """Takes over what the oldest step computed and drew, and indexes the pages that it filled.

        Returns: the sequences whose logits were not numbers. They got no token, and no page of this
            step of theirs is indexed.
        """
        assert self._steps[0] is scheduled, "steps are read in the order they were scheduled"
        self._steps.popleft()
        sits = self._table.sitting[scheduled.rows.seats] == scheduled.sittings
        draws = sits[scheduled.rows.sampled]
        broken = [
            scheduled.sampled[i]
            for i in np.flatnonzero(np.isnan(result.logprobs))
            if draws[i] or scheduled.sampled[i].is_awaited
        ]
        self._note_computed(scheduled, sits, broken)
        self._note_drawn(scheduled, result.token_ids.tolist(), draws, broken)
        for sequence in scheduled.firsts:
            if sequence.first_token_s is None and sequence.num_output_tokens:
                sequence.first_token_s = now
        return broken

    def discard(self, scheduled: Scheduled) -> None:
        """Forgets a step that failed."""
        self._steps.remove(scheduled)

    def _note_computed(self, scheduled: Scheduled, sits: Flags, broken: list[Sequence]) -> None:
        """What was computed for a sequence that has stood up since is nobody's."""
        seats, num_new = scheduled.rows.seats, scheduled.rows.num_new * sits
        num_computed = self._table.num_computed[seats] + num_new
        self._table.num_computed[seats] = num_computed
        for row in np.flatnonzero(num_new > num_computed % self._pool.page_size).tolist():
            sequence = scheduled.sequences[row]
            if sequence not in broken:
                changed = self._pool.index_computed(sequence, int(num_computed[row]))
                self._table.copy_pages(sequence, changed)

    def _note_drawn(
        self, scheduled: Scheduled, token_ids: list[int], draws: Flags, broken: list[Sequence]
    ) -> None:
        """A preempted sequence takes its token too: it was drawn before the pages changed hands.
        One that begins again after a failed step does not.
        """
        if not broken and draws.all():
            for sequence, token_id in zip(scheduled.sampled, token_ids, strict=True):
                sequence.token_ids.append(token_id)
            return
        for sequence, token_id, sits in zip(
            scheduled.sampled, token_ids, draws.tolist(), strict=True
        ):
            is_its_own = sits or sequence.is_awaited
            sequence.is_awaited = False
            if is_its_own and sequence.status is not Status.FINISHED and sequence not in broken:
                sequence.token_ids.append(token_id)
