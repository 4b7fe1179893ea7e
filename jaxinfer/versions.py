"""The versions of the weights that an engine may compute with, and who still needs which.

Host only: no JAX. A request keeps the version that it began with. A version that is retired takes
no new requests; when its last sequence has ended, and no step of it is under way, it is let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from jaxinfer.errors import InvalidRequest
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """What belongs to the weights and is not on the device."""

    name: str  # content hash of the weights
    tokenizer: Tokenizer | None  # None: outputs have token ids and no text
    eos_token_ids: frozenset[int]  # that end an answer


class Versions:
    """The versions that are there; one of them is current.

    Args:
        first: current until another is.
    """

    def __init__(self, first: ModelVersion):
        self._by_name = {first.name: first}
        self._retired: set[str] = set()
        self._num_live: Counter[str] = Counter()  # sequences; no zeros
        self._current = first.name

    @property
    def current(self) -> str:
        """The version of requests that name none."""
        return self._current

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there, retired ones too, in the order of their coming."""
        return tuple(self._by_name)

    @property
    def has_retired(self) -> bool:
        """Whether one waits to be let go."""
        return bool(self._retired)

    def num_live(self, name: str) -> int:
        """Sequences of this version that have not ended."""
        return self._num_live[name]

    def choose(self, name: str | None) -> ModelVersion:
        """Raises: InvalidRequest for one that is not there, or is retired."""
        name = name or self._current
        if not self.takes(name):
            takes = ", ".join(n for n in self._by_name if n not in self._retired)
            raise InvalidRequest(
                f"the weights version {name[:80]!r} takes no requests; there is {takes}",
                param="version",
            )
        return self._by_name[name]

    def takes(self, name: str) -> bool:
        """Whether it is there and not retired."""
        return name in self._by_name and name not in self._retired

    def add(self, found: ModelVersion) -> None:
        """Raises: ValueError if it is there."""
        if found.name in self._by_name:
            raise ValueError(f"version {found.name} is there already")
        self._by_name[found.name] = found

    def become_current(self, name: str) -> None:
        """Raises: InvalidRequest as `choose`."""
        self._current = self.choose(name).name

    def retire(self, name: str) -> None:
        """Takes no new requests; unknown ones are ignored. Raises: ValueError for the current."""
        if name == self._current:
            raise ValueError(f"version {name} is current; make another one current first")
        if name in self._by_name:
            self._retired.add(name)

    def take_back(self, found: ModelVersion) -> None:
        """One that was retired takes requests again. Raises: ValueError if it is not there."""
        if found.name not in self._retired:
            raise ValueError(f"version {found.name} is not retired")
        self._retired.remove(found.name)
        self._by_name[found.name] = found

    def begin(self, name: str) -> None:
        """A sequence of this version lives."""
        self._num_live[name] += 1

    def end(self, name: str) -> None:
        self._num_live[name] -= 1
        if not self._num_live[name]:
            del self._num_live[name]

    def let_go(self, under_way: Collection[str]) -> list[str]:
        """Forgets the retired that nobody needs. `under_way`: versions of the steps under way."""
        free = [n for n in self._retired if n not in self._num_live and n not in under_way]
        for name in free:
            self._retired.remove(name)
            del self._by_name[name]
        return free
