"""How a new version of the weights takes over: a pure state machine, fed by facts and a clock.

    loading --- `loaded` ---> canary;  --- `failed` ---> failed
    canary --- the last stage has ended, or `promote` ---> promoted
    canary --- a signal gives the alarm, or `roll_back` ---> rolled back
    promoted --- `roll_back` ---> rolled back

Host only: no JAX, no HTTP, no threads. It decides and says why; whoever feeds it obeys.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.canary.guard import Guard
from jaxinfer.canary.schedule import DEFAULT_STAGES, Stage, check_share, check_stages
from jaxinfer.canary.signal import Evidence
from jaxinfer.canary.signals import Signals
from jaxinfer.errors import Conflict, InvalidRequest
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.stats import StepStats

__all__ = ("Decision", "Evidence", "Guard", "Phase", "Rollout", "RolloutPlan", "Stage", "place_of")


Kind = Literal["load", "begin", "advance", "stay", "promote", "roll_back", "fail"]
By = Literal["plan", "signal", "operator", "loading", "server"]


class Phase(enum.StrEnum):
    """Where a rollout stands."""

    LOADING = "loading"
    CANARY = "canary"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"  # while loading


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What an operator orders.

    Raises: InvalidRequest for values that cannot work.
    """

    stages: tuple[Stage, ...] = DEFAULT_STAGES  # none: promoted as soon as it is loaded
    guard: Guard = field(default_factory=Guard)
    shadow_share: float = 0.0  # of the requests, 0..1, that both versions compute
    promotes: bool = True  # after the last stage; False: it stays there until somebody does

    def __post_init__(self):
        check_stages(self.stages)
        check_share("shadow_share", self.shadow_share)
        if not (self.stages or self.promotes):
            raise InvalidRequest(
                "a canary that is not promoted by itself needs a stage, that is a share of the "
                "traffic",
                param="share",
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and all that it rests on."""

    kind: Kind
    by: By
    reason: str  # one sentence for people
    numbers: Mapping[str, float | int | str]


class Rollout:
    """One new version, from its loading to its end. Calls are cheap, and memory does not grow.

    Facts of other versions, or of a time when there is no canary, are ignored. What has been rolled
    back stays so.

    Args:
        stable: the version that serves.
        now: monotonic seconds, here and everywhere.
    """

    def __init__(self, plan: RolloutPlan, *, stable: str, now: float):
        self.plan = plan
        self.stable = stable
        self.canary: str | None = None  # its name, once it is loaded
        self._phase = Phase.LOADING
        self._stage = 0  # index, in the phase canary
        self._has_ended_stages = False
        self._signals = Signals(plan.guard, has_shadow=plan.shadow_share > 0.0)
        self._decisions: list[Decision] = []
        self._began_s = now
        self._stage_began_s = now
        self._num_requests = 0  # of the canary that ended, without those that a client ended
        self._num_stage_requests = 0  # of these since the stage began
        self._has_stable = True
        self._decide("load", "operator", "a new version is being loaded", now)

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def share(self) -> float:
        """Of the keys that get the new version, 0..1."""
        if self._phase is Phase.CANARY:
            return self.plan.stages[self._stage].share
        return float(self._phase is Phase.PROMOTED)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """In the order of their making."""
        return tuple(self._decisions)

    def evidence(self) -> tuple[Evidence, ...]:
        """What each signal has seen of the canary."""
        return self._signals.evidence()

    def loaded(self, version: str, now: float) -> Decision | None:
        """The new version can serve. Raises: Conflict when it is not awaited."""
        if self._phase is not Phase.LOADING:
            raise Conflict(f"version {version} is not awaited: the rollout is {self._phase}")
        self.canary = version
        if not self.plan.stages:
            return self._end(
                Phase.PROMOTED, "promote", "plan", "it was ordered without a canary", now
            )
        self._phase = Phase.CANARY
        self._begin_stage(0, now)
        return self._decide("begin", "plan", f"it is loaded and gets {_percent(self.share)}", now)

    def failed(self, reason: str, now: float) -> Decision | None:
        """Loading came to nothing; ignored when it had ended."""
        if self._phase is not Phase.LOADING:
            return None
        return self._end(Phase.FAILED, "fail", "loading", reason, now)

    def stable_is_gone(self) -> None:
        """The version from before was dropped: there is no way back to it."""
        self._has_stable = False

    def note_request(self, facts: RequestFacts, now: float) -> Decision | None:
        """A choice has ended, of either version."""
        if not self._is_tried(facts.version):
            return None
        is_canary = facts.version == self.canary
        if is_canary and facts.finish is not FinishReason.ABORT:
            self._num_requests += 1
            self._num_stage_requests += 1
        return self._heed(self._signals.note_request(facts, now, is_canary=is_canary), now)

    def note_step(self, stats: StepStats, now: float) -> Decision | None:
        """A step was read, of either version."""
        if not self._is_tried(stats.version):
            return None
        is_canary = stats.version == self.canary
        return self._heed(self._signals.note_step(stats, now, is_canary=is_canary), now)

    def note_failed_step(self, version: str, now: float) -> Decision | None:
        """A step failed, of either version."""
        if not self._is_tried(version):
            return None
        is_canary = version == self.canary
        return self._heed(self._signals.note_failed_step(now, is_canary=is_canary), now)

    def note_shadow(self, facts: ShadowFacts, now: float) -> Decision | None:
        """A prompt was computed by both versions."""
        if self._phase is not Phase.CANARY:
            return None
        return self._heed(self._signals.note_shadow(facts), now)

    def tick(self, now: float) -> Decision | None:
        """Time has passed: ends a stage whose time and requests have come."""
        if self._phase is not Phase.CANARY or self._has_ended_stages:
            return None
        stage = self.plan.stages[self._stage]
        if (
            now - self._stage_began_s < stage.hold_s
            or self._num_stage_requests < stage.min_requests
        ):
            return None
        done = f"{self._num_stage_requests} requests at {_percent(stage.share)} without an alarm"
        if self._stage + 1 < len(self.plan.stages):
            return self._advance(done, now)
        if self.plan.promotes:
            return self._end(Phase.PROMOTED, "promote", "plan", done, now)
        self._has_ended_stages = True
        return self._decide("stay", "plan", f"{done}; it stays so until somebody promotes it", now)

    def promote(self, now: float) -> Decision | None:
        """By hand, at once. Raises: Conflict if there is no canary."""
        if self._phase is not Phase.CANARY:
            raise Conflict(f"there is no canary to promote: {self._words()}")
        return self._end(Phase.PROMOTED, "promote", "operator", "an operator promoted it", now)

    def roll_back(self, now: float, reason: str, *, by: By = "operator") -> Decision | None:
        """At once. Raises: Conflict if there is nothing to go back from, or to."""
        if self._phase not in (Phase.CANARY, Phase.PROMOTED):
            raise Conflict(f"there is no version to roll back: {self._words()}")
        if not self._has_stable:
            raise Conflict(
                f"there is no way back: version {self.stable} was dropped; load it as a new version"
            )
        return self._end(Phase.ROLLED_BACK, "roll_back", by, reason, now)

    def _is_tried(self, version: str) -> bool:
        return self._phase is Phase.CANARY and version in (self.canary, self.stable)

    def _heed(self, alarm: Evidence | None, now: float) -> Decision | None:
        if alarm is None:
            return None
        reason = f"{alarm.name}: {_told(alarm)}"
        numbers = {
            "signal": alarm.name,
            "unit": alarm.unit,
            "e_value": alarm.e_value,
            "threshold": alarm.threshold,
            "num_observations": alarm.num_observations,
            **({} if alarm.canary is None else {"canary_mean": alarm.canary}),
            **({} if alarm.stable is None else {"stable_mean": alarm.stable}),
            "false_alarm_rate": self.plan.guard.false_alarm_rate,
        }
        return self._end(Phase.ROLLED_BACK, "roll_back", "signal", reason, now, numbers)

    def _advance(self, done: str, now: float) -> Decision:
        next_share = _percent(self.plan.stages[self._stage + 1].share)
        decision = self._decide("advance", "plan", f"{done}; it gets {next_share}", now)
        self._begin_stage(self._stage + 1, now)
        return decision

    def _begin_stage(self, stage: int, now: float) -> None:
        self._stage = stage
        self._stage_began_s = now
        self._num_stage_requests = 0
        self._signals.begin_stage(now)

    def _end(
        self,
        phase: Phase,
        kind: Kind,
        by: By,
        reason: str,
        now: float,
        numbers: Mapping[str, float | int | str] | None = None,
    ) -> Decision:
        decision = self._decide(kind, by, reason, now, numbers)
        self._phase = phase
        return decision

    def _decide(
        self,
        kind: Kind,
        by: By,
        reason: str,
        now: float,
        numbers: Mapping[str, float | int | str] | None = None,
    ) -> Decision:
        """With the numbers from before it."""
        known = {
            "share": self.share,
            "elapsed_s": now - self._began_s,
            "stage_s": now - self._stage_began_s,
            "num_requests": self._num_requests,
            "num_stage_requests": self._num_stage_requests,
        }
        decision = Decision(kind, by, reason, {**known, **(numbers or {})})
        self._decisions.append(decision)
        return decision

    def _words(self) -> str:
        match self._phase:
            case Phase.LOADING:
                return "the new version is still loading; wait for it"
            case Phase.PROMOTED:
                return f"version {self.canary} is promoted already"
            case Phase.ROLLED_BACK:
                return f"version {self.canary} was rolled back; load it again to try it again"
            case Phase.FAILED:
                return "the new version could not be loaded; load another one"
            case Phase.CANARY:
                return f"version {self.canary} gets {_percent(self.share)}"


def place_of(key: str, version: str) -> float:
    """Where a key stands in [0, 1): those below the canary's share get it.

    Another version has other first keys, and a share that grows only adds keys.
    """
    digest = hashlib.blake2b(f"{version}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _percent(share: float) -> str:
    return f"{100 * share:g} % of the traffic"


def _told(alarm: Evidence) -> str:
    """What an alarm rests on."""
    seen = "" if alarm.canary is None else f"{alarm.canary:.3g} {alarm.unit}"
    beside = "" if alarm.stable is None else f" beside {alarm.stable:.3g}"
    return (
        f"{seen}{beside} over {alarm.num_observations} observations; e-value {alarm.e_value:.4g}, "
        f"threshold {alarm.threshold:g}"
    )
