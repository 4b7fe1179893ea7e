"""Failures that came together, of one cause.

Pure: the clock is an argument.
"""

from __future__ import annotations

import math

INCIDENT_S = 0.05  # failures that are nearer to the last counted one are of its incident


class Incidents:
    """Of the canary."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def begins(self, now: float) -> bool:
        """Whether a failure is of a new incident, and so counts."""
        if now - self._last_s < INCIDENT_S:
            return False
        self._last_s = now
        return True
