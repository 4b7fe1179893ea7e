"""Whose turn it is: a step computes with one version of the weights.

Host only: no JAX. Usually there is one version; there are more while a new one is tried or an old
one drains. Those that have work get steps in proportion to their shares (idea: stride scheduling
with start tags, Waldspurger 1995, Goyal 1996); with equal shares they take turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

MAX_APART = 4  # steps of others between two of a version that has work
_STRIDE = 100  # of the largest share of those that have work; the others' are longer


class VersionTurns:
    """Counts the running sequences of each version, and remembers when each had its last step.

    A version's *lead* is how far it is ahead of what its share gives it, in hundredths of a step of
    the largest share. Whoever has the smallest is next; a step adds the version's stride. A version
    that could not run gets no more for it later than one step at once.

    However small its share, a version that has work waits for at most MAX_APART steps of others, or
    for one of each of them if these are more, and for one more where another version comes anew
    right behind its own step. With two versions, one of which is a canary of 1 %, the canary so has
    one step in five: its answers come at most five times slower, and it costs the others a fifth of
    the steps. With turns a single sequence of it would halve the speed of everybody else; without
    the bound its answers would take a hundred times longer.
    """

    def __init__(self) -> None:
        self.num_running: Counter[str] = Counter()  # no zeros
        self._shares: dict[str, float] = {}
        self._leads: dict[str, int] = {}  # of those that had work when it was last asked
        self._last_turn: dict[str, float] = {}  # the same
        self._num_turns = 0

    @property
    def is_mixed(self) -> bool:
        """Whether sequences of more than one version run."""
        return len(self.num_running) > 1

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """In place of those before. Of what is not named it is 1.

        Raises: ValueError for a share below 0, or that is not a finite number.
        """
        for version, share in shares.items():
            if not 0 <= share < math.inf:
                raise ValueError(f"the share of version {version} is {share}; give 0 or more")
        self._shares = dict(shares)
        self._leads = {v: min(lead, self._stride(v)) for v, lead in self._leads.items()}

    def start(self, version: str) -> None:
        """A sequence of this version runs from here on."""
        self.num_running[version] += 1

    def stop(self, version: str) -> None:
        self.num_running[version] -= 1
        if not self.num_running[version]:
            del self.num_running[version]

    def order(self, waiting: str | None) -> list[str]:
        """Versions to try, the one whose turn it is first.

        One that comes anew is treated as if it had had a step just before the last one. So it has
        no more than its share however often it comes, and of those that are there it overtakes only
        the one that had the very last step, so that none can be overtaken for ever.

        Args:
            waiting: the version of the sequence that would start next, if there is a seat for it.
        """
        versions = list(self.num_running)
        if waiting is not None and waiting not in self.num_running:
            versions.append(waiting)
        if versions != list(self._last_turn):
            self._compare(versions)
        return sorted(versions, key=self._place) if len(versions) > 1 else versions

    def take(self, version: str) -> None:
        """This version, one of the last `order`, has its step now."""
        self._num_turns += 1
        self._last_turn[version] = self._num_turns
        if len(self._leads) > 1:
            start = self._leads[version]
            self._leads = {v: max(0, lead - start) for v, lead in self._leads.items()}
        self._leads[version] = self._stride(version)

    def _compare(self, versions: list[str]) -> None:
        """These have work from here on, so strides are other ones, also that of the last step."""
        last_turn, leads, anew = self._last_turn, self._leads, self._num_turns - 0.5
        self._last_turn = {version: last_turn.get(version, anew) for version in versions}
        self._leads = {
            version: self._stride(version) if turn > self._num_turns - 1 else leads[version]
            for version, turn in self._last_turn.items()
        }

    def _place(self, version: str) -> tuple[int, float]:
        """In the order: whoever has waited for long enough, then by lead; then by last turn."""
        last_turn = self._last_turn[version]
        has_waited = self._num_turns - last_turn >= MAX_APART
        return -1 if has_waited else self._leads[version], last_turn

    def _stride(self, version: str) -> int:
        """How much a step adds to its lead: the largest share in proportion to its own."""
        if len(self._last_turn) < 2:
            return _STRIDE
        most = max(self._shares.get(v, 1.0) for v in self._last_turn)
        share = self._shares.get(version, 1.0)
        return round(_STRIDE * (most / share if most < share * MAX_APART else MAX_APART))
