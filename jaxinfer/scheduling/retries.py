"""Who begins again after a failed step, how often, and who has one try left.

Host only: no JAX. A step fails as a whole and does not say because of whom. So the last try of a
sequence is a *trial*: nothing else is under way while it lasts. A sequence therefore ends by
failures only if a step of its own failed, whatever it met before.

The count of a sequence starts again when a step of it that was read got further than ever: to
another token of output or, before the first one, to another token of the prompt. Each time that
raises num_proven_tokens, which its length bounds; in between are at most max_retries failures. So
no sequence begins again for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.scheduling.sequence_heap import SequenceHeap


class Retries:
    """Counts, and the queue of those that wait for their trial.

    Args:
        max_retries: in a row, without getting further; 0: none.
    """

    def __init__(self, max_retries: int):
        self._max_retries = max_retries
        self._counted: set[Sequence] = set()
        self.waiting = SequenceHeap()  # for their trial, best rank first
        self.trial: Sequence | None = None  # the one that runs alone

    @property
    def has_suspects(self) -> bool:
        return self.trial is not None or len(self.waiting) > 0

    def count(self, sequence: Sequence) -> bool:
        """A try of it has failed. Returns: whether it may begin again.

        Failures that it meets while it waits for its trial are not its own.
        """
        sequence.num_proven_tokens = max(sequence.num_proven_tokens, sequence.num_reached_tokens)
        is_last = sequence.num_retries >= self._max_retries
        if is_last and (sequence is self.trial or not self._max_retries):
            return False
        if not is_last:
            sequence.num_retries += 1
        self.remember(sequence)
        return True

    def remember(self, sequence: Sequence) -> None:
        """Watches how far it gets, if a try of it has failed."""
        if sequence.num_retries:
            self._counted.add(sequence)

    def enter(self, sequence: Sequence) -> bool:
        """Of a sequence that does not run. Returns: whether it waits for its trial now."""
        self.remember(sequence)
        if not sequence.num_retries or sequence.num_retries < self._max_retries:
            return False
        self.waiting.push(sequence.rank, sequence)
        return True

    def begin_trial(self) -> Sequence:
        """The best of those that wait for their trial, which is on now."""
        first = self.waiting.peek()
        assert first is not None
        self.trial = first[1]
        self.waiting.remove(self.trial)
        return self.trial

    def note_read(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """A step of these was read: who got further than ever starts to count anew.

        Returns: those of them that waited for their trial, and now for their turn like others. They
            were paused and resumed while a token of them was on its way.
        """
        freed: list[Sequence] = []
        if not self._counted:
            return freed
        for sequence in self._counted.intersection(sequences):
            reached = sequence.num_reached_tokens
            if reached > sequence.num_proven_tokens:
                sequence.num_proven_tokens, sequence.num_retries = reached, 0
                if sequence in self.waiting:
                    freed.append(sequence)
                self.remove(sequence)
        return freed

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that counts anew or has ended."""
        self._counted.discard(sequence)
        self.withdraw(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """It stands up, or waits no more for its trial; what was counted stays."""
        self.waiting.remove(sequence)
        if self.trial is sequence:
            self.trial = None
