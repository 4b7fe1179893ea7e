"""A few simulated canaries of each kind: bad ones are found, sound ones are not; the table."""

from __future__ import annotations

from random import Random

import pytest

from bench.swap.scenarios import Machine, Pool, Scenario, scenarios
from bench.swap.simulation import (
    Ended,
    Findings,
    Speed,
    Traffic,
    simulate,
    simulate_all,
    table,
)
from jaxinfer.rollout import RolloutPlan, Stage

SCENARIOS = {scenario.name: scenario for scenario in scenarios(Random(0))}
SHORT = RolloutPlan((Stage(0.25, hold_s=60.0), Stage(0.5, hold_s=60.0)), shadow_share=0.2)
LONG = RolloutPlan(shadow_share=0.1)


def simulated(name: str, plan: RolloutPlan = LONG, num: int = 2) -> Findings:
    return simulate(SCENARIOS[name], num_canaries=num, seed=1, plan=plan, traffic=Traffic())


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS.values() if s.is_bad])
def test_bad_canaries_are_rolled_back(name: str):
    findings = simulated(name)
    assert findings.share == 1.0
    assert findings.is_as_promised


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS.values() if not s.is_bad])
def test_sound_canaries_are_promoted(name: str):
    findings = simulated(name, SHORT)
    assert findings.share == 0.0
    assert all(ended.after_s >= 120.0 for ended in findings.ended)


def test_the_first_request_that_is_not_numbers_is_the_last():
    assert {ended.num_requests for ended in simulated("not numbers").ended} == {1}


def test_the_same_seed_gives_the_same_canaries():
    assert simulated("10 % slower") == simulated("10 % slower")


def test_the_pools_can_be_measured_ones():
    like = SCENARIOS["the same weights"]
    measured = Scenario("measured", like.stable, Pool(like.canary.answers, slowdown=2.0))
    findings = simulate(measured, num_canaries=1, seed=1, plan=LONG, traffic=Traffic())
    assert findings.ended[0].signal == "step_time"


def test_a_step_of_a_slower_version_takes_as_much_longer():
    quiet = Speed(Machine(step_s=0.1, noise=0.0), Random(1))
    assert quiet.step_s(1.5, 0.0) == pytest.approx(0.15)


def test_bursts_take_their_share_of_the_steps():
    speed = Speed(Machine(noise=0.0, burst_share=0.2, burst_steps=10.0), Random(1))
    seconds: list[float] = []
    for _ in range(4000):
        speed.skip(1.0)
        seconds.append(speed.step_s(1.0, 0.0))
    assert 0.1 < sum(s > 0.1 for s in seconds) / 4000 < 0.3


def found(num: int, after_s: float) -> Ended:
    return Ended("step_time", num, after_s)


def test_the_table_by_hand():
    bad = Findings("slow", True, [found(10, 20.0), found(30, 60.0), found(20, 4000.0)], 0.01)
    good = Findings("same", False, [Ended(None, 500, 9000.0)] * 199 + [found(1, 2.0)], 0.01)
    lines = list(table([good, bad]))
    assert lines[3].split() == ["same", "0.5%", "1", "1", "2", "2", "step_time"]
    assert lines[4].split() == ["slow", "100.0%", "20", "30", "60", "4,000", "step_time"]
    assert lines[5].startswith("sound ones rolled back: 1 of 200, that is 0.50%; stated: at most 1")
    assert max(map(len, lines)) <= 100


def test_what_was_promised_allows_for_chance_but_not_for_much():
    def sound(num_found: int) -> Findings:
        ended = [found(1, 1.0)] * num_found + [Ended(None, 1, 1.0)] * (1000 - num_found)
        return Findings("same", False, ended, 0.01)

    assert sound(19).is_as_promised
    assert not sound(20).is_as_promised
    assert not Findings("bad", True, [found(1, 1.0), Ended(None, 1, 1.0)], 0.01).is_as_promised


def test_every_kind_is_simulated_and_has_its_line():
    kinds = list(simulate_all(1, plan=SHORT))
    assert [kind.name for kind in kinds] == list(SCENARIOS)
    assert len(list(table(kinds))) == 3 + len(kinds) + 1
