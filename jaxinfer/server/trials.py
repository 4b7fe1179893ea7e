"""Feeds the machine that judges a new version, and does what it decides.

No HTTP and no JAX. Everything belongs to the event loop. Calls go elsewhere in the call that
decides, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.errors import Conflict
from jaxinfer.rollout import Phase, Rollout

if TYPE_CHECKING:
    from jaxinfer.canary.facts import RequestFacts, ShadowFacts
    from jaxinfer.rollout import By, Decision, RolloutPlan
    from jaxinfer.server.decision_book import DecisionBook
    from jaxinfer.server.listening import Listening
    from jaxinfer.server.roster import Roster
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.version_slot import VersionSlot
    from jaxinfer.stats import Verdict

MAX_FAILED_STEPS = 5  # of a canary, in a row


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A version and the machine that judges it; kept after its end, to be shown."""

    slot: VersionSlot
    machine: Rollout


class Trials:
    """One at a time.

    Args:
        ailment_of: why a model will not answer any more; None: it will.
        standby_s: how long the version before a promoted one stands by.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        roster: Roster,
        book: DecisionBook,
        listening: Listening,
        *,
        ailment_of: Callable[[ServedModel], str | None],
        standby_s: float,
        clock: Callable[[], float],
    ):
        self._roster = roster
        self._book = book
        self._listening = listening
        self._ailment_of = ailment_of
        self._standby_s = standby_s
        self._clock = clock
        self._last: Trial | None = None
        self._promoted: Trial | None = None  # whose version before may stand by

    @property
    def last(self) -> Trial | None:
        """Under way, or the last one."""
        return self._last

    @property
    def canary(self) -> Trial | None:
        """Whose version gets a share of the calls."""
        trial = self._last
        return trial if trial is not None and trial.slot.life == "canary" else None

    def begin(self, slot: VersionSlot, plan: RolloutPlan) -> Trial:
        """A version is on its way."""
        machine = Rollout(plan, stable=self._roster.stable.name, now=self._clock())
        self._last = Trial(slot, machine)
        self._book.ordered(machine, slot.name)
        return self._last

    def arrived(self, trial: Trial) -> None:
        """It has answered what it should."""
        trial.machine.stable = self._roster.stable.name  # since the order, one may have gone back
        self._decide(trial, trial.machine.loaded(trial.slot.name, self._clock()))

    def has_replaced(self, trial: Trial, before: VersionSlot) -> None:
        """It came in the place of `before`, so there is nothing to try it beside."""
        now, machine = self._clock(), trial.machine
        self._roster.replace(before, trial.slot)
        self._decide(trial, machine.loaded(trial.slot.name, now))
        if machine.phase is Phase.CANARY:
            self._decide(trial, machine.promote(now))
        machine.stable_is_gone()

    def failed(self, trial: Trial, reason: str) -> None:
        """It will not come."""
        self._decide(trial, trial.machine.failed(reason, self._clock()))

    def stop(self) -> None:
        """The server shuts down: nothing is judged any more."""
        self._listening.end()

    # ---- by hand

    def promote(self, trial: Trial) -> None:
        """A canary. Raises: Conflict."""
        self._decide(trial, trial.machine.promote(self._clock()))

    def roll_back(self, trial: Trial, reason: str, *, by: By = "operator") -> None:
        """A canary, or the promoted version while the one before it stands by. Raises: Conflict."""
        self._decide(trial, trial.machine.roll_back(self._clock(), reason, by=by))

    def go_back(self, reason: str, *, by: By = "operator") -> None:
        """To the version that stands by. Raises: Conflict if there is none."""
        if self._promoted is None or self._roster.standby is None:
            raise Conflict(
                f"there is no version to go back to from {self._roster.stable.name}; load it as a "
                "new version",
                param="version",
            )
        self.roll_back(self._promoted, reason, by=by)

    def end_standby(self, reason: str, *, by: str) -> None:
        """Who stands by leaves; there may be nobody."""
        slot = self._roster.standby
        if slot is None:
            return
        if self._promoted is not None:
            self._promoted.machine.stable_is_gone()
            self._promoted = None
        self._roster.send_away(slot)
        self._book.note("drop", slot.name, by=by, reason=reason)

    # ---- what is told: see Judge

    def note_request(self, facts: RequestFacts) -> None:
        """See Judge."""
        trial = self.canary
        if trial is not None:
            self._decide(trial, trial.machine.note_request(facts, self._clock()))

    def note_shadow(self, facts: ShadowFacts) -> None:
        """See Judge."""
        trial = self.canary
        if trial is not None:
            self._decide(trial, trial.machine.note_shadow(facts, self._clock()))

    def note_verdict(self, verdict: Verdict) -> None:
        """See Judge."""
        trial, now = self.canary, self._clock()
        if trial is None:
            return
        if verdict.version == trial.slot.name:
            trial.slot.num_failed_steps = (trial.slot.num_failed_steps + 1) * (not verdict.is_good)
        if verdict.stats is not None:
            self._decide(trial, trial.machine.note_step(verdict.stats, now))
        else:
            self._decide(trial, trial.machine.note_failed_step(verdict.version, now))
        num_failed = trial.slot.num_failed_steps
        if num_failed >= MAX_FAILED_STEPS and trial is self.canary:
            self.roll_back(trial, f"{num_failed} of its steps failed in a row", by="server")

    def tick(self) -> None:
        """Time has passed."""
        now, trial = self._clock(), self.canary
        if trial is not None:
            ailment = self._ailment_apart(trial.slot, self._roster.stable)
            if ailment is None:
                self._decide(trial, trial.machine.tick(now))
            else:
                self.roll_back(trial, ailment, by="server")
        standby = self._roster.standby
        if standby is None:
            return
        ailment = self._ailment_apart(self._roster.stable, standby)
        if ailment is not None:
            self.go_back(ailment, by="server")
        elif now - standby.standby_since_s >= self._standby_s:
            self.end_standby(f"it stood by for {self._standby_s:g} s", by="plan")

    def _ailment_apart(self, slot: VersionSlot, other: VersionSlot) -> str | None:
        """Why it will not answer, while the other one, on another engine, may."""
        if slot.engine is other.engine or slot.model is None:
            return None
        return self._ailment_of(slot.model)

    # ---- what is decided

    def _decide(self, trial: Trial, decision: Decision | None) -> None:
        if decision is not None:
            self._obey(trial)
            self._book.decided(decision, trial.machine, trial.slot.name)

    def _obey(self, trial: Trial) -> None:
        slot, machine = trial.slot, trial.machine
        is_new = slot.life == "proving"
        match machine.phase:
            case Phase.CANARY if slot.life != "stable":
                self._roster.try_out(slot, machine.share)
                if is_new:
                    self._listen(trial)
                return
            case Phase.PROMOTED if slot.life != "stable":
                self._roster.make_stable(slot, self._clock())
                self._promoted = trial
            case Phase.ROLLED_BACK if slot.life == "stable":
                self._roster.go_back()
                self._promoted = None
            case Phase.ROLLED_BACK:
                self._roster.send_away(slot)
            case _:
                pass
        self._listening.end()

    def _listen(self, trial: Trial) -> None:
        stable, canary = self._roster.stable.model, trial.slot.model
        assert stable is not None
        assert canary is not None
        share = trial.machine.plan.shadow_share
        self._listening.begin(self, stable=stable, canary=canary, shadow_share=share)
