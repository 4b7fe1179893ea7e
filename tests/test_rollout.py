"""A new version takes over, or goes: phases, stages, alarms and hands, and any mixture of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.errors import Conflict
from jaxinfer.rollout import Decision, Guard, Phase, Rollout, RolloutPlan, Stage, place_of
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.stats import StepStats

OLD, NEW = "v1", "v2"
STAGES = (Stage(0.1, hold_s=10.0, min_requests=2), Stage(0.5, hold_s=20.0, min_requests=0))
ERROR, STOP = FinishReason.ERROR, FinishReason.STOP


def request(
    version: str = NEW, finish: FinishReason = STOP, *, is_not_numbers: bool = False
) -> RequestFacts:
    return RequestFacts(version, finish, 10, 0.0, 0.1, is_not_numbers)


def step(version: str, seconds: float) -> StepStats:
    return StepStats("decode", 1, 1, 8, 1, seconds, version)


def canary(stages: tuple[Stage, ...] = STAGES, **fields: Any) -> Rollout:
    """Loaded at 0 s."""
    rollout = Rollout(RolloutPlan(stages, **fields), stable=OLD, now=-5.0)
    rollout.loaded(NEW, 0.0)
    return rollout


def kind(decision: Decision | None) -> str | None:
    return decision and decision.kind


def test_while_it_is_loading_nobody_gets_it():
    rollout = Rollout(RolloutPlan(STAGES), stable=OLD, now=0.0)
    assert (rollout.phase, rollout.share, rollout.canary) == (Phase.LOADING, 0.0, None)
    assert [d.kind for d in rollout.decisions] == ["load"]
    assert rollout.tick(1e9) is None


def test_once_loaded_it_gets_the_share_of_the_first_stage():
    rollout = Rollout(RolloutPlan(STAGES), stable=OLD, now=0.0)
    decision = rollout.loaded(NEW, 30.0)
    assert decision
    assert (decision.kind, decision.by) == ("begin", "plan")
    assert decision.reason == "it is loaded and gets 10 % of the traffic"
    assert decision.numbers["elapsed_s"] == 30.0
    assert (rollout.phase, rollout.share, rollout.canary) == (Phase.CANARY, 0.1, NEW)


def test_a_stage_ends_when_time_and_requests_have_come():
    rollout = canary()
    rollout.note_request(request(), 1.0)
    rollout.note_request(request(OLD), 1.0)
    assert rollout.tick(100.0) is None  # one request is not two
    rollout.note_request(request(), 100.0)
    decision = rollout.tick(100.0)
    assert decision
    assert decision.kind == "advance"
    assert decision.reason == (
        "2 requests at 10 % of the traffic without an alarm; it gets 50 % of the traffic"
    )
    assert decision.numbers == {
        "share": 0.1,
        "elapsed_s": 105.0,
        "stage_s": 100.0,
        "num_requests": 2,
        "num_stage_requests": 2,
    }
    assert rollout.share == 0.5


def test_enough_requests_do_not_shorten_a_stage():
    rollout = canary()
    for _ in range(5):
        rollout.note_request(request(), 1.0)
    assert rollout.tick(9.9) is None
    assert kind(rollout.tick(10.0)) == "advance"
    assert rollout.tick(29.9) is None  # 20 s from then on
    decision = rollout.tick(30.0)
    assert decision
    assert (decision.kind, decision.by) == ("promote", "plan")
    assert (rollout.phase, rollout.share) == (Phase.PROMOTED, 1.0)


def test_without_traffic_there_is_no_progress():
    rollout = canary()
    assert rollout.tick(1e9) is None
    assert rollout.share == 0.1


def test_requests_that_their_client_ended_do_not_count():
    rollout = canary()
    for _ in range(5):
        rollout.note_request(request(finish=FinishReason.ABORT), 1.0)
    assert rollout.tick(100.0) is None


def test_a_fixed_share_stays_until_somebody_promotes_it():
    rollout = canary((Stage(0.1, hold_s=10.0),), promotes=False)
    assert kind(rollout.tick(10.0)) == "stay"
    assert rollout.tick(20.0) is None  # said once
    assert rollout.share == 0.1
    decision = rollout.promote(30.0)
    assert decision
    assert (decision.kind, decision.by) == ("promote", "operator")
    assert rollout.share == 1.0


def test_a_fixed_share_is_still_watched():
    rollout = canary((Stage(0.1, hold_s=10.0),), promotes=False)
    rollout.tick(10.0)
    assert kind(rollout.note_request(request(finish=ERROR, is_not_numbers=True), 20.0)) == (
        "roll_back"
    )


def test_without_stages_it_is_promoted_at_once():
    rollout = Rollout(RolloutPlan(()), stable=OLD, now=0.0)
    assert kind(rollout.loaded(NEW, 1.0)) == "promote"
    assert rollout.share == 1.0


def test_what_cannot_be_loaded_ends_the_rollout():
    rollout = Rollout(RolloutPlan(STAGES), stable=OLD, now=0.0)
    decision = rollout.failed("file a.safetensors is truncated", 1.0)
    assert decision
    assert (decision.kind, decision.by) == ("fail", "loading")
    assert decision.reason == "file a.safetensors is truncated"
    assert (rollout.phase, rollout.share) == (Phase.FAILED, 0.0)
    with pytest.raises(Conflict, match="not awaited"):
        rollout.loaded(NEW, 2.0)
    assert rollout.failed("again", 2.0) is None


def test_one_request_that_is_not_numbers_rolls_back_with_its_numbers():
    rollout = canary()
    rollout.note_request(request(), 1.0)
    decision = rollout.note_request(request(finish=ERROR, is_not_numbers=True), 2.0)
    assert decision
    assert (decision.kind, decision.by) == ("roll_back", "signal")
    assert decision.numbers == {
        "share": 0.1,
        "elapsed_s": 7.0,
        "stage_s": 2.0,
        "num_requests": 2,
        "num_stage_requests": 2,
        "signal": "not_numbers",
        "unit": "share",
        "e_value": 1.0,
        "threshold": 1.0,
        "num_observations": 2,
        "canary_mean": 0.5,
        "false_alarm_rate": 0.01,
    }
    assert (rollout.phase, rollout.share) == (Phase.ROLLED_BACK, 0.0)


def test_a_slower_canary_is_rolled_back_and_the_reason_says_how_much():
    rollout = canary()
    for i in range(100):
        rollout.note_step(step(OLD, 0.1), i)
        rollout.note_step(step(NEW, 0.12), i)
    decision = rollout.decisions[-1]
    assert (decision.kind, decision.by) == ("roll_back", "signal")
    assert decision.reason.startswith("step_time: 1.2 times the stable version's over 1")
    assert "e-value" in decision.reason


def test_a_slower_canary_is_kept_if_nobody_minds():
    rollout = canary(guard=Guard(max_slowdown=None))
    for i in range(100):
        rollout.note_step(step(OLD, 0.1), i)
        assert rollout.note_step(step(NEW, 0.5), i) is None


def test_failed_steps_of_the_canary_roll_it_back_and_those_of_the_stable_version_do_not():
    rollout = canary()
    for i in range(50):
        assert rollout.note_failed_step(OLD, i) is None
        rollout.note_step(step(NEW, 0.1), i)
    rollout = canary()
    for i in range(50):
        rollout.note_step(step(OLD, 0.1), i)
        rollout.note_failed_step(NEW, i)
    assert rollout.decisions[-1].numbers["signal"] == "failed_steps"


def test_a_quietly_worse_canary_is_found_by_its_shadow():
    rollout = canary(shadow_share=0.1)
    decisions = [rollout.note_shadow(ShadowFacts(64, 0.01, 0.1), i) for i in range(60)]
    (decision,) = [d for d in decisions if d]
    assert decision.numbers["signal"] == "nll_increase"


def test_without_a_shadow_share_nobody_looks_at_shadows():
    rollout = canary()
    assert all(rollout.note_shadow(ShadowFacts(64, 9.0, 9.0), i) is None for i in range(60))


@pytest.mark.parametrize("version", ["v3", "", "v1 "])
def test_facts_of_other_versions_are_ignored(version: str):
    rollout = canary()
    before = rollout.evidence()
    rollout.note_request(request(version, ERROR, is_not_numbers=True), 1.0)
    rollout.note_step(step(version, 1.0), 1.0)
    rollout.note_failed_step(version, 1.0)
    assert rollout.evidence() == before


def test_facts_after_the_end_are_ignored():
    rollout = canary()
    rollout.promote(1.0)
    for fact in (request(finish=ERROR, is_not_numbers=True), request(OLD)):
        assert rollout.note_request(fact, 2.0) is None
    assert rollout.tick(1e9) is None
    assert rollout.phase is Phase.PROMOTED


def test_promote_without_a_canary_says_what_there_is():
    rollout = Rollout(RolloutPlan(STAGES), stable=OLD, now=0.0)
    with pytest.raises(Conflict, match="still loading; wait for it"):
        rollout.promote(1.0)
    rollout.loaded(NEW, 1.0)
    rollout.promote(1.0)
    with pytest.raises(Conflict, match="v2 is promoted already"):
        rollout.promote(2.0)


def test_a_promoted_version_can_be_rolled_back_while_the_old_one_stands_by():
    rollout = canary()
    rollout.promote(1.0)
    decision = rollout.roll_back(2.0, "alice: answers are odd")
    assert decision
    assert (decision.by, decision.reason) == ("operator", "alice: answers are odd")
    assert rollout.phase is Phase.ROLLED_BACK


def test_a_server_that_rolls_back_on_its_own_account_is_named():
    decision = canary().roll_back(2.0, "its engine has died", by="server")
    assert decision
    assert decision.by == "server"


def test_there_is_no_way_back_to_a_version_that_was_dropped():
    rollout = canary()
    rollout.promote(1.0)
    rollout.stable_is_gone()
    with pytest.raises(Conflict, match="v1 was dropped; load it"):
        rollout.roll_back(2.0, "odd")
    assert rollout.phase is Phase.PROMOTED


def test_what_was_rolled_back_stays_so():
    rollout = canary()
    rollout.roll_back(1.0, "odd")
    with pytest.raises(Conflict, match="rolled back; load it again"):
        rollout.promote(2.0)
    with pytest.raises(Conflict, match="no version to roll back"):
        rollout.roll_back(2.0, "odd")
    with pytest.raises(Conflict):
        rollout.loaded(NEW, 2.0)


def test_while_loading_there_is_nothing_to_roll_back():
    with pytest.raises(Conflict, match="still loading"):
        Rollout(RolloutPlan(STAGES), stable=OLD, now=0.0).roll_back(1.0, "odd")


def test_the_evidence_names_each_signal_once():
    names = [e.name for e in canary(shadow_share=0.1).evidence()]
    assert names[0] == "not_numbers"
    assert len(names) == len(set(names)) == 9


def test_a_share_that_grows_only_adds_keys():
    keys = [f"user {i}" for i in range(1000)]
    few = {key for key in keys if place_of(key, NEW) < 0.05}
    many = {key for key in keys if place_of(key, NEW) < 0.25}
    assert few < many
    assert 30 <= len(few) <= 75
    assert few != {key for key in keys if place_of(key, "v3") < 0.05}


versions = st.sampled_from([OLD, NEW, "v3"])
CAME_FROM = {
    Phase.LOADING: {Phase.LOADING},
    Phase.CANARY: {Phase.LOADING, Phase.CANARY},
    Phase.PROMOTED: {Phase.LOADING, Phase.CANARY, Phase.PROMOTED},
    Phase.ROLLED_BACK: {Phase.CANARY, Phase.PROMOTED, Phase.ROLLED_BACK},
    Phase.FAILED: {Phase.LOADING, Phase.FAILED},
}


class RolloutMachine(RuleBasedStateMachine):
    """Anything at any time: phases only go forward, and each change has its decision."""

    @initialize(
        shares=st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]), unique=True, max_size=4),
        hold_s=st.sampled_from([0.0, 10.0]),
        min_requests=st.integers(0, 3),
        promotes=st.booleans(),
    )
    def begin(self, shares: list[float], hold_s: float, min_requests: int, promotes: bool):
        stages = tuple(Stage(share, hold_s, min_requests) for share in sorted(shares))
        self.now = 0.0
        self.plan = RolloutPlan(stages, shadow_share=0.5, promotes=promotes or not stages)
        self.rollout = Rollout(self.plan, stable=OLD, now=self.now)
        self.seen = (Phase.LOADING, 0.0, 1)

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0, 100.0]))
    def tick(self, seconds: float):
        self.now += seconds
        self.check(self.rollout.tick(self.now), by={"plan"})

    @precondition(lambda self: self.rollout.phase is Phase.LOADING)
    @rule()
    def loaded(self):
        self.check(self.rollout.loaded(NEW, self.now), by={"plan"})

    @rule()
    def failed(self):
        was = self.rollout.phase
        decision = self.rollout.failed("no such file", self.now)
        assert (decision is not None) == (was is Phase.LOADING)
        self.check(decision, by={"loading"})

    @rule(version=versions, finish=st.sampled_from(FinishReason), num=st.integers(1, 20))
    def requests(self, version: str, finish: FinishReason, num: int):
        for _ in range(num):
            self.now += 0.1
            decision = self.rollout.note_request(request(version, finish), self.now)
            self.check(decision, by={"signal"})

    @rule(version=versions)
    def not_numbers(self, version: str):
        was = self.rollout.phase
        fact = request(version, ERROR, is_not_numbers=True)
        decision = self.rollout.note_request(fact, self.now)
        assert (version != NEW or was is not Phase.CANARY) or decision
        self.check(decision, by={"signal"})

    @rule(version=versions, seconds=st.floats(0.0, 10.0), num=st.integers(1, 20))
    def steps(self, version: str, seconds: float, num: int):
        for _ in range(num):
            self.check(self.rollout.note_step(step(version, seconds), self.now), by={"signal"})

    @rule(version=versions)
    def failed_step(self, version: str):
        self.check(self.rollout.note_failed_step(version, self.now), by={"signal"})

    @rule(kl=st.floats(0.0, 100.0), nll=st.floats(-100.0, 100.0))
    def shadow(self, kl: float, nll: float):
        self.check(self.rollout.note_shadow(ShadowFacts(8, kl, nll), self.now), by={"signal"})

    @rule()
    def promote(self):
        if self.rollout.phase is Phase.CANARY:
            assert self.rollout.promote(self.now)
        else:
            with pytest.raises(Conflict):
                self.rollout.promote(self.now)
        self.look(by={"operator"})

    @rule()
    def roll_back(self):
        if self.rollout.phase in (Phase.CANARY, Phase.PROMOTED):
            assert self.rollout.roll_back(self.now, "odd")
        else:
            with pytest.raises(Conflict):
                self.rollout.roll_back(self.now, "odd")
        self.look(by={"operator"})

    def check(self, decision: Decision | None, *, by: set[str]):
        """A decision is returned exactly if one was made."""
        num = len(self.rollout.decisions) - self.seen[2]
        assert num == (decision is not None)
        assert decision is None or self.rollout.decisions[-1] == decision
        self.look(by=by)

    def look(self, *, by: set[str]):
        """A change of phase or share has its decision, by whom it should be."""
        was, share, num = self.seen
        made = self.rollout.decisions[num:]
        assert self.rollout.phase is was or made
        assert self.rollout.share == share or made
        assert was in CAME_FROM[self.rollout.phase]
        assert all(decision.by in by for decision in made)
        self.seen = (self.rollout.phase, self.rollout.share, len(self.rollout.decisions))

    @invariant()
    def shares_fit_the_phase(self):
        match self.rollout.phase:
            case Phase.CANARY:
                assert self.rollout.share in [stage.share for stage in self.plan.stages]
            case Phase.PROMOTED:
                assert self.rollout.share == 1.0
            case _:
                assert self.rollout.share == 0.0

    @invariant()
    def evidence_is_of_finite_numbers(self):
        for evidence in self.rollout.evidence():
            assert 0.0 <= evidence.e_value < math.inf
            assert not evidence.is_alarm or self.rollout.phase is not Phase.CANARY


RolloutMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRollout = RolloutMachine.TestCase
