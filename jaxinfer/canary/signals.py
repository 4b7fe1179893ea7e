"""All signals in which a canary may be worse.

The false-alarm rate of a rollout is divided equally over the tests that are on, which holds
whatever they have to do with each other (Bonferroni). `not_numbers` takes none of it: a sound
version has no such request, so one is enough.

Host only: no JAX, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.canary.guard import Guard
from jaxinfer.canary.request_signals import RequestSignals
from jaxinfer.canary.shadow_signals import ShadowSignals
from jaxinfer.canary.signal import Evidence, Signal
from jaxinfer.canary.step_signals import StepSignals
from jaxinfer.stats import StepStats


class Signals:
    """Each `note_` returns the evidence of an alarm, if there is one.

    Args:
        has_shadow: some requests are computed by both versions.
    """

    def __init__(self, guard: Guard, *, has_shadow: bool):
        self._requests = RequestSignals(guard)
        self._steps = StepSignals(guard)
        self._shadow = ShadowSignals(guard) if has_shadow else None
        self._num_requests = 0  # of the canary
        self._num_not_numbers = 0
        signals = tuple(self._all())
        for signal in signals:
            signal.threshold = len(signals) / guard.false_alarm_rate

    def begin_stage(self, now: float) -> None:
        """The canary's share of the keys is another from now on."""
        self._requests.begin_stage(now)

    def note_request(self, facts: RequestFacts, now: float, *, is_canary: bool) -> Evidence | None:
        if is_canary:
            self._num_requests += 1
            self._num_not_numbers += facts.is_not_numbers
        self._requests.note(facts, now, is_canary=is_canary)
        return self._not_numbers() if self._num_not_numbers else _alarm(self._requests.all)

    def note_step(self, stats: StepStats, now: float, *, is_canary: bool) -> Evidence | None:
        self._steps.note(stats, now, is_canary=is_canary)
        return _alarm(self._steps.all)

    def note_failed_step(self, now: float, *, is_canary: bool) -> Evidence | None:
        self._steps.note_failed(now, is_canary=is_canary)
        return _alarm(self._steps.all)

    def note_shadow(self, facts: ShadowFacts) -> Evidence | None:
        if self._shadow is None:
            return None
        self._shadow.note(facts)
        return _alarm(self._shadow.all)

    def evidence(self) -> tuple[Evidence, ...]:
        """Of each signal, the certain one first."""
        return (self._not_numbers(), *(signal.evidence() for signal in self._all()))

    def _all(self) -> Iterable[Signal]:
        yield from self._requests.all
        yield from self._steps.all
        if self._shadow:
            yield from self._shadow.all

    def _not_numbers(self) -> Evidence:
        """Its number of requests stands for an e-value."""
        num, of = self._num_not_numbers, self._num_requests
        share = num / of if of else None
        return Evidence("not_numbers", "share", float(num), 1.0, of, share, None)


def _alarm(signals: Iterable[Signal]) -> Evidence | None:
    for signal in signals:
        if signal.is_alarm:
            return signal.evidence()
    return None
