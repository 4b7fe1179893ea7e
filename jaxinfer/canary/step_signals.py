"""How the steps of a canary go, beside those of the stable version."""

from __future__ import annotations

import math

from jaxinfer.canary.guard import Guard
from jaxinfer.canary.incidents import Incidents
from jaxinfer.canary.pairing import Pairing, StepPairing
from jaxinfer.canary.signal import Signal
from jaxinfer.stats import StepStats

LEAST_S = 1e-9  # of a step, to divide by


class StepSignals:
    """Failures always; times if a slowdown is guarded.

    Of a pair of steps it counts whether the canary's took longer than is tolerated: as often as
    not if it is just as much slower. So one very slow step says no more than any other.
    """

    def __init__(self, guard: Guard):
        self._factor = 1.0 + (guard.max_slowdown or 0.0)
        self._failed = Signal("failed_steps", "share", 0.5)
        self._time: Signal | None = None
        if guard.max_slowdown is not None:
            self._time = Signal("step_time", "times the stable version's", 0.5, shown=math.exp)
        self.all = (self._failed, self._time) if self._time else (self._failed,)
        self._pairing = StepPairing()
        self._outcomes = Pairing[bool]()  # whether it failed
        self._incidents = Incidents()

    def note(self, stats: StepStats, now: float, *, is_canary: bool) -> None:
        self._note_outcome(False, is_canary=is_canary)
        pair = self._pairing.note(stats, now, is_canary=is_canary)
        if pair is None or self._time is None:
            return
        ratio = max(pair.canary, LEAST_S) / max(pair.stable, LEAST_S)
        self._time.see(math.log(ratio))
        self._time.bet(ratio > self._factor)

    def note_failed(self, now: float, *, is_canary: bool) -> None:
        if not is_canary or self._incidents.begins(now):
            self._note_outcome(True, is_canary=is_canary)

    def _note_outcome(self, has_failed: bool, *, is_canary: bool) -> None:
        pair = self._outcomes.note(has_failed, is_canary=is_canary)
        if pair is None:
            return
        self._failed.see(pair.canary, pair.stable)
        if pair.canary != pair.stable:
            self._failed.bet(pair.canary)
