"""One thing in which a canary may be worse: its null, the bets against it, and what was seen.

Pure: no clock, no chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.canary.sequential import Bets


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a signal has seen. If its e-value has reached the threshold, the canary is worse."""

    name: str
    unit: str  # of the two means
    e_value: float  # 1 at first
    threshold: float  # a sound canary ever reaches it with a chance of at most 1 / threshold
    num_observations: int  # canary beside stable
    canary: float | None  # mean of those observations; None: there is none
    stable: float | None  # None, too, where the canary's says how it is beside the stable version

    @property
    def is_alarm(self) -> bool:
        return self.e_value >= self.threshold


class Signal:
    """Gives the alarm once, and for good.

    Args:
        m0: largest mean of what is bet on, under the null.
        is_two_sided: the null also bounds the mean from below, by 1 - m0.
        shown: what people see of a mean.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        m0: float,
        *,
        is_two_sided: bool = False,
        shown: Callable[[float], float] = float,
    ):
        self.name = name
        self.threshold = math.inf
        self.is_alarm = False
        self._unit = unit
        self._above = Bets(m0)
        self._below = Bets(m0) if is_two_sided else None
        self._shown = shown
        self._num_observations = 0
        self._canary_sum = 0.0
        self._stable_sum: float | None = None

    def see(self, canary: float, stable: float | None = None) -> None:
        """What people are shown the mean of."""
        self._num_observations += 1
        self._canary_sum += canary
        if stable is not None:
            self._stable_sum = (self._stable_sum or 0.0) + stable

    def bet(self, x: float) -> None:
        """What the test is told, within 0..1; not all that is seen need be worth a bet."""
        if self.is_alarm:
            return
        self._above.note(x)
        if self._below:
            self._below.note(1.0 - x)
        self.is_alarm = self.e_value >= self.threshold

    @property
    def e_value(self) -> float:
        """Against both bounds together it is the mean of those against each."""
        if self._below is None:
            return self._above.e_value
        return (self._above.e_value + self._below.e_value) / 2

    def evidence(self) -> Evidence:
        n = self._num_observations
        canary = self._shown(self._canary_sum / n) if n else None
        stable = None if self._stable_sum is None else self._shown(self._stable_sum / n)
        return Evidence(self.name, self._unit, self.e_value, self.threshold, n, canary, stable)


def difference(canary: bool, stable: bool) -> float:
    """0..1; its mean is 0.5 and half of what the canary's share is over the stable version's."""
    return 0.5 + (canary - stable) / 2


def rank(canary: float, stable: float) -> float:
    """Whether the canary's is larger; of equals, half."""
    return 0.5 if canary == stable else float(canary > stable)


def scaled(value: float, low: float, high: float) -> float:
    """0..1: where it lies between two bounds; beyond one, the bound."""
    return min(max((value - low) / (high - low), 0.0), 1.0)
