"""Where numbers stand on an axis, and which of them are written there. Knows no picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
MAX_DECADES = 12
LEAST_STEP_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, which stand at 0 and 1.

    Raises: ValueError for bounds that are not finite, not in order, or not above 0 on a log axis.
    """

    low: float
    high: float
    is_log: bool = False

    def __post_init__(self) -> None:
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not finite or self.low >= self.high or (self.is_log and self.low <= 0):
            raise ValueError(f"expected low < high on an axis, above 0 if it is log; got {self}")

    @classmethod
    def over(cls, values: Sequence[float], *, is_log: bool = False) -> Axis:
        """That begins and ends at a tick and holds all values: from 0, if it is not log.

        On a log axis what is not above 0 counts for nothing, and MAX_DECADES are shown at most.
        """
        shown = [value for value in values if not is_log or value > 0]
        if is_log:
            high = 10.0 ** math.ceil(math.log10(max(shown, default=1.0)))
            low = 10.0 ** math.floor(math.log10(min(shown, default=0.1)))
            low = min(max(low, high * 10.0**-MAX_DECADES), high / 10)
            return cls(low, high, is_log=True)
        low, high = min(0.0, *shown, 0.0), max(0.0, *shown, 0.0)
        if low == high:
            return cls(0.0, 1.0)
        step = _step(low, high)
        return cls(math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step)

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`; what lies outside is put at the end."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Round numbers, about five; powers of ten on a log axis."""
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            every = 1 + (last - first) // 7
            return [10.0**power for power in range(first, last + 1, every)]
        step = _step(self.low, self.high)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, LEAST_STEP_DIGITS) for number in range(first, last + 1)]


def _step(low: float, high: float) -> float:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in STEPS if step * power >= rough * 0.999)


def label(value: float) -> str:
    """As short as it can be said: 0.002, 1500, 1e-06."""
    return f"{value:.6g}"
