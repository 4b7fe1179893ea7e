"""Steps that were scheduled and have not been read, and what reading them changes.

Host only: no JAX. Steps run, and are read, in the order in which they were scheduled.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.running_table import RunningTable
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.sequence import Sequence, Status


class StepsUnderWay:
    """Oldest first; one or two of them."""

    def __init__(self, pool: PagePool, table: RunningTable):
        self._pool, self._table = pool, table
        self._steps: deque[Scheduled] = deque()

    def add(self, scheduled: Scheduled) -> None:
        """Counts on what the step will do."""
        for sequence, length in zip(scheduled.sequences, scheduled.num_new, strict=True):
            sequence.num_scheduled_tokens += length
        self._steps.append(scheduled)

    def is_filling(self, digest: bytes | None) -> bool:
        """Whether one of the steps fills the page of this digest."""
        return any(digest in step.filling for step in self._steps)

    def note_gone(self, sequence: Sequence) -> None:
        """The sequence gives its pages back: what is under way for it is nobody's."""
        for step in self._steps:
            step.gone.add(sequence)

    def read(self, scheduled: Scheduled, result: StepResult, now: float) -> list[Sequence]:
        """Takes over what the oldest step computed and drew, and indexes the pages that it filled.

        Returns: the sequences whose logits were not numbers. They got no token, and no page of this
            step of theirs is indexed.
        """
        assert self._steps[0] is scheduled, "steps are read in the order they were scheduled"
        self._steps.popleft()
        broken = [scheduled.sampled[i] for i in np.flatnonzero(np.isnan(result.logprobs))]
        token_ids = result.token_ids.tolist()
        if scheduled.batch.kind == "decode" and not broken and not scheduled.gone:
            self._note_decoded(scheduled, token_ids)
        else:
            self._note_computed(scheduled, broken)
            self._note_drawn(scheduled, token_ids, broken)
        for sequence in scheduled.firsts:
            if sequence.first_token_s is None and sequence.num_output_tokens:
                sequence.first_token_s = now
        return broken

    def discard(self, scheduled: Scheduled) -> None:
        """Forgets a step that failed."""
        self._steps.remove(scheduled)

    def clear(self) -> None:
        """Forgets all of them."""
        self._steps.clear()

    def _note_decoded(self, scheduled: Scheduled, token_ids: list[int]) -> None:
        """The usual decode step, one token for each and nothing odd: the quick way."""
        for sequence, token_id in zip(scheduled.sequences, token_ids, strict=True):
            sequence.num_computed_tokens += 1
            sequence.token_ids.append(token_id)
        num_computed = scheduled.batch.positions[: len(token_ids)] + 1
        for row in np.flatnonzero(num_computed % self._pool.page_size == 0):
            self._index(scheduled.sequences[row])

    def _note_computed(self, scheduled: Scheduled, broken: list[Sequence]) -> None:
        for sequence, length in zip(scheduled.sequences, scheduled.num_new, strict=True):
            if sequence in scheduled.gone:
                continue
            sequence.num_computed_tokens += length
            is_page_full = length > sequence.num_computed_tokens % self._pool.page_size
            if is_page_full and sequence not in broken:
                self._index(sequence)

    def _note_drawn(
        self, scheduled: Scheduled, token_ids: list[int], broken: list[Sequence]
    ) -> None:
        """A preempted sequence takes its token too: it was drawn before the pages changed hands."""
        for sequence, token_id in zip(scheduled.sampled, token_ids, strict=True):
            sequence.is_awaited = False
            if sequence.status is not Status.FINISHED and sequence not in broken:
                sequence.token_ids.append(token_id)

    def _index(self, sequence: Sequence) -> None:
        self._table.copy_pages(sequence, self._pool.index_computed(sequence))
