"""Stages, guards and plans that cannot work are refused with what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxinfer.canary.guard import Guard
from jaxinfer.canary.schedule import DEFAULT_STAGES, Stage
from jaxinfer.errors import InvalidRequest
from jaxinfer.rollout import RolloutPlan


def test_the_default_schedule_grows_to_half_of_the_traffic():
    assert [stage.share for stage in DEFAULT_STAGES] == [0.01, 0.05, 0.25, 0.5]
    assert RolloutPlan().promotes


@pytest.mark.parametrize("share", [-0.1, 1.1, 10.0, math.nan, math.inf])
def test_a_share_outside_the_traffic_is_refused(share: float):
    with pytest.raises(InvalidRequest, match=r"within 0\.\.1.*0\.1 is 10 %") as caught:
        Stage(share)
    assert caught.value.param == "share"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_and_all_of_the_traffic_are_shares(share: float):
    assert Stage(share).share == share


@pytest.mark.parametrize("hold_s", [-1.0, math.nan, math.inf])
def test_a_stage_without_an_end_is_refused(hold_s: float):
    with pytest.raises(InvalidRequest, match="hold_s"):
        Stage(0.1, hold_s=hold_s)


def test_a_negative_number_of_requests_is_refused():
    with pytest.raises(InvalidRequest, match="min_requests"):
        Stage(0.1, min_requests=-1)


@pytest.mark.parametrize("shares", [(0.1, 0.1), (0.5, 0.1)])
def test_shares_that_do_not_grow_are_refused(shares: tuple[float, ...]):
    with pytest.raises(InvalidRequest, match=r"larger share.*0\.1 follows"):
        RolloutPlan(tuple(Stage(share) for share in shares))


def test_a_schedule_without_bounds_is_refused():
    with pytest.raises(InvalidRequest, match="at most 100 stages, not 101"):
        RolloutPlan(tuple(Stage(i / 200) for i in range(101)))


def test_a_canary_without_a_stage_or_an_end_is_refused():
    with pytest.raises(InvalidRequest, match="needs a stage"):
        RolloutPlan((), promotes=False)


def test_a_shadow_share_outside_the_traffic_is_refused():
    with pytest.raises(InvalidRequest, match="shadow_share"):
        RolloutPlan(shadow_share=2.0)


@pytest.mark.parametrize(
    "field",
    [
        {"false_alarm_rate": 0.0},
        {"false_alarm_rate": 0.9},
        {"false_alarm_rate": None},
        {"max_slowdown": -0.1},
        {"max_slowdown": math.nan},
        {"max_slowdown": "5 %"},
        {"max_kl": 0.0},
        {"max_nll_increase": 1.5},
        {"max_length_rank": 0.4},
        {"max_repetition_rank": 1.0},
        {"max_cut_increase": 1.0},
    ],
    ids=str,
)
def test_a_guard_that_cannot_work_is_refused(field: dict[str, Any]):
    (name,) = field
    with pytest.raises(InvalidRequest, match=rf"{name} is within") as caught:
        Guard(**field)
    assert caught.value.param == name


def test_each_signal_but_failures_can_be_turned_off():
    Guard(
        max_slowdown=None,
        max_kl=None,
        max_nll_increase=None,
        max_length_rank=None,
        max_repetition_rank=None,
        max_cut_increase=None,
    )
