"""Which observation of the canary is compared with which of the stable version.

Each is used once, and with one that was near in time: what the machine or the traffic did to both
then cancels. What is chosen never depends on what was seen, only on when. Bounded; no imports of
ours but plain data.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, Literal, NamedTuple, TypeVar

from jaxinfer.stats import StepStats

T = TypeVar("T")
MAX_WAITING = 64  # observations of a version without a partner; beyond, the oldest is dropped
MAX_APART_S = 10.0  # of two steps that are compared


class Pair(NamedTuple, Generic[T]):
    canary: T
    stable: T


class Pairing(Generic[T]):
    """The newest of either side that has no partner waits for one."""

    def __init__(self):
        self._waiting: deque[T] = deque(maxlen=MAX_WAITING)
        self._is_canary = False  # whose those are

    def note(self, seen: T, *, is_canary: bool) -> Pair[T] | None:
        """Returns: it and its partner, if there is one."""
        if self._waiting and self._is_canary != is_canary:
            other = self._waiting.pop()
            return Pair(seen, other) if is_canary else Pair(other, seen)
        self._is_canary = is_canary
        self._waiting.append(seen)
        return None

    def forget(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()


class _Step(NamedTuple):
    is_canary: bool
    duration_s: float
    at_s: float


class _Like(NamedTuple):
    """What two steps that are compared have in common."""

    kind: Literal["prefill", "decode"]
    bucket: int  # tokens
    work: int  # class of real rows or tokens
    is_after_other: bool


class StepPairing:
    """Steps of the same kind, bucket and work, of which both or neither followed other weights.

    In the same bucket, a step with fewer real rows attends to less, and the version with the
    smaller share has fewer. A step after one of other weights finds those in the caches, as nearly
    all of a canary with a small share do.

    Neighbours are paired, stable first or canary first as it comes: on a machine whose speed
    wanders, a difference of neighbours is followed by its opposite sooner than by its like, so that
    a run of pairs says no more than one of independent pairs.
    """

    def __init__(self):
        self._pending: dict[_Like, _Step] = {}
        self._last_is_canary: bool | None = None

    def note(self, stats: StepStats, now: float, *, is_canary: bool) -> Pair[float] | None:
        """Returns: the seconds of two steps, when there is a pair."""
        is_after_other = self._last_is_canary is (not is_canary)
        self._last_is_canary = is_canary
        work = _size_class(stats.num_seqs if stats.kind == "decode" else stats.num_tokens)
        key = _Like(stats.kind, stats.num_padded_tokens, work, is_after_other)
        step = _Step(is_canary, stats.duration_s, now)
        other = self._pending.pop(key, None)
        if other and other.is_canary != is_canary and now - other.at_s <= MAX_APART_S:
            canary, stable = (step, other) if is_canary else (other, step)
            return Pair(canary.duration_s, stable.duration_s)
        self._pending[key] = step
        return None


def _size_class(num: int) -> int:
    """Of sizes that differ by less than about 9 %; small ones have a class each."""
    return num if num < 12 else round(8.0 * math.log2(num))
