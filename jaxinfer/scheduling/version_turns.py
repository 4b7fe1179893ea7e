"""Whose turn it is: a step computes with one version of the weights.

Host only: no JAX. Usually there is one version; there are more while a new one is tried or an old
one drains. Each that has work gets a step in turn.
"""

from __future__ import annotations

from collections import Counter


class VersionTurns:
    """Counts the running sequences of each version, and remembers when each had its last step."""

    def __init__(self) -> None:
        self.num_running: Counter[str] = Counter()  # no zeros
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0

    @property
    def is_mixed(self) -> bool:
        """Whether sequences of more than one version run."""
        return len(self.num_running) > 1

    def start(self, version: str) -> None:
        """A sequence of this version runs from here on."""
        self.num_running[version] += 1

    def stop(self, version: str) -> None:
        self.num_running[version] -= 1
        if not self.num_running[version]:
            del self.num_running[version]

    def order(self, waiting: str | None) -> list[str]:
        """Versions to try, the one whose last turn is longest ago first.

        One that comes anew overtakes only the one that had the very last turn, so that none of
        those that are there can be overtaken for ever.

        Args:
            waiting: the version of the sequence that would start next, if there is a seat for it.
        """
        versions = list(self.num_running)
        if waiting is not None and waiting not in self.num_running:
            versions.append(waiting)
        last_turn, before_last = self._last_turn, self._num_turns - 1
        self._last_turn = {version: last_turn.get(version, before_last) for version in versions}
        return sorted(versions, key=self._last_turn.__getitem__)

    def take(self, version: str) -> None:
        """This version has its step now."""
        self._num_turns += 1
        self._last_turn[version] = self._num_turns
