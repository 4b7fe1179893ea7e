"""How long a request may take: the smallest of what the server, its class and it itself say.

Pure. Time counts from the arrival of the call, so reading, tokenization and waiting are in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxinfer.errors import InvalidRequest

TIMEOUT_HEADER = "x-request-timeout"


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds from arrival. None: no limit."""

    timeout_s: float | None = None  # to the last token; then 504
    queue_timeout_s: float | None = None  # to the first step; then 429

    def within(self, other: TimeLimits) -> TimeLimits:
        """The smaller of each."""
        return TimeLimits(
            _least(self.timeout_s, other.timeout_s),
            _least(self.queue_timeout_s, other.queue_timeout_s),
        )

    def after(self, seconds: float) -> TimeLimits:
        """What is left of them."""
        return TimeLimits(
            None if self.timeout_s is None else self.timeout_s - seconds,
            None if self.queue_timeout_s is None else self.queue_timeout_s - seconds,
        )

    def deadlines(self, arrival_s: float) -> tuple[float | None, float | None]:
        """As moments of the clock that `arrival_s` is of: of the last token, of the first step."""
        moments = self.after(-arrival_s)
        return moments.timeout_s, moments.queue_timeout_s


NO_LIMITS = TimeLimits()


def asked_limits(field: float | None, header: str | None) -> TimeLimits:
    """What a request itself asks for, in its body's `timeout` and its header.

    Raises: InvalidRequest naming the one at fault.
    """
    return TimeLimits(_least(_seconds(field, "timeout"), _seconds(header, TIMEOUT_HEADER)))


def _seconds(value: float | str | None, param: str) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        shown = value[:40] if isinstance(value, str) else value
        raise InvalidRequest(f"{param} must be seconds above 0; got {shown!r}", param=param)
    return seconds


def _least(one: float | None, other: float | None) -> float | None:
    return min((s for s in (one, other) if s is not None), default=None)
