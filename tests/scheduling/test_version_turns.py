"""Tests of which version of the weights has the next step."""

from __future__ import annotations

import math
import random

import pytest

from jaxinfer.scheduling.version_turns import MAX_APART, VersionTurns


def test_one_version_has_every_turn():
    turns = VersionTurns()
    turns.start("v1")
    assert turns.order(None) == ["v1"]
    turns.take("v1")
    assert turns.order("v1") == ["v1"]
    assert not turns.is_mixed


def test_versions_that_run_take_turns():
    turns = VersionTurns()
    for version in ("v1", "v2", "v3"):
        turns.start(version)
    taken = []
    for _ in range(7):
        taken.append(turns.order(None)[0])
        turns.take(taken[-1])
    assert taken == ["v1", "v2", "v3", "v1", "v2", "v3", "v1"]
    assert turns.is_mixed


def test_a_version_that_waits_for_its_first_seat_is_tried_first():
    turns = VersionTurns()
    turns.start("v1")
    turns.take("v1")
    assert turns.order("v2") == ["v2", "v1"]
    assert turns.order(None) == ["v1"]


def test_versions_that_come_and_go_do_not_keep_one_that_stays_from_its_turn():
    turns = VersionTurns()
    turns.start("v1")
    taken = []
    for number in range(6):
        taken.append(turns.order(f"v{2 + number % 2}")[0])
        turns.take(taken[-1])
    assert taken.count("v1") >= 3


def test_a_version_is_forgotten_with_its_last_sequence():
    turns = VersionTurns()
    for version in ("v1", "v1", "v2"):
        turns.start(version)
    turns.stop("v1")
    assert turns.is_mixed
    turns.stop("v1")
    assert not turns.is_mixed
    assert turns.order(None) == ["v2"]
    turns.stop("v2")
    assert turns.order(None) == []


def taken(turns: VersionTurns, number: int) -> str:
    """Who has the next turns, where whoever is first can run."""
    versions: list[str] = []
    for _ in range(number):
        versions.append(turns.order(None)[0])
        turns.take(versions[-1])
    return "".join(versions)


def turns_of(shares: dict[str, float]) -> VersionTurns:
    turns = VersionTurns()
    turns.set_shares(shares)
    for version in shares:
        turns.start(version)
    return turns


def test_versions_have_turns_in_proportion_to_their_shares():
    assert taken(turns_of({"a": 0.75, "b": 0.25}), 12).count("b") == 3
    assert taken(turns_of({"a": 0.6, "b": 0.4}), 20).count("b") == 8
    assert taken(turns_of({"a": 0.5, "b": 0.3, "c": 0.2}), 40).count("a") == 20


def test_a_canary_of_one_percent_has_one_turn_in_five():
    assert taken(turns_of({"a": 0.99, "b": 0.01}), 18)[3:] == "baaaabaaaabaaaa"


def test_a_share_of_nothing_still_has_one_turn_in_five():
    """Of a version that was rolled back, and whose requests go on to their ends."""
    assert taken(turns_of({"a": 1.0, "b": 0.0}), 18)[3:] == "baaaabaaaabaaaa"
    assert taken(turns_of({"a": 0.0, "b": 0.0}), 4) == "abab"


def test_two_canaries_wait_for_four_steps_of_others_each():
    """By their leads it would be six: four of the large one for both of the small ones."""
    assert taken(turns_of({"a": 0.98, "b": 0.01, "c": 0.01}), 15)[3:] == "bcaaabcaaabc"


def test_a_version_that_is_not_named_has_a_share_of_one():
    turns = turns_of({"a": 0.5})
    turns.start("b")
    assert taken(turns, 9).count("b") == 6


def test_shares_replace_those_before_and_count_at_once():
    turns = turns_of({"a": 0.99, "b": 0.01})
    assert taken(turns, 4) == "aaab"
    turns.set_shares({"b": 1.0})
    assert taken(turns, 4) == "abab"


@pytest.mark.parametrize("share", [-0.1, math.inf, math.nan])
def test_a_share_that_is_none_is_refused_and_nothing_is_changed(share):
    turns = turns_of({"a": 0.99, "b": 0.01})
    with pytest.raises(ValueError, match="the share of version b is"):
        turns.set_shares({"a": 1.0, "b": share})
    assert taken(turns, 4) == "aaab"


def test_requests_of_one_step_each_get_no_more_than_their_share():
    turns = VersionTurns()
    turns.set_shares({"a": 0.99, "b": 0.01})
    turns.start("a")
    versions = ""
    for _ in range(50):
        versions += turns.order("b")[0]  # it waits, and ends with its step
        turns.take(versions[-1])
    assert versions.count("b") == 10


def test_what_was_done_alone_is_not_held_against_the_canary_for_ever():
    turns = VersionTurns()
    turns.set_shares({"a": 0.99, "b": 0.01})
    turns.start("b")
    assert taken(turns, 100) == "b" * 100
    turns.start("a")
    assert taken(turns, 9) == "aaabaaaab"


def test_who_could_not_run_has_no_claim_to_the_turns_that_others_had():
    turns = turns_of({"a": 0.5, "b": 0.5})
    for _ in range(10):
        assert "a" in turns.order(None)
        turns.take("a")
    assert taken(turns, 4) == "baba"


def equal_turns(last_turn: dict[str, float], versions: list[str], num_turns: int) -> list[str]:
    """Round robin: the last turn longest ago first; of one that comes anew it was the one before
    the last.
    """
    for version in set(last_turn) - set(versions):
        del last_turn[version]
    for version in versions:
        last_turn.setdefault(version, num_turns - 1)
    return sorted(versions, key=last_turn.__getitem__)


def test_with_equal_shares_turns_are_those_of_a_round_robin():
    rng, turns = random.Random(0), VersionTurns()
    last_turn: dict[str, float] = {}
    num_turns = 0
    for _ in range(3000):
        for version in list(turns.num_running):
            if rng.random() < 0.2:
                turns.stop(version)
        waiting = rng.choice([None, "a", "b", "c", "d"])
        versions = list(turns.num_running)
        if waiting is not None and waiting not in versions:
            versions.append(waiting)
        order = turns.order(waiting)
        assert order == equal_turns(last_turn, versions, num_turns)
        if order:  # the others could not run, where it is not the first
            version = order[0] if rng.random() < 0.7 else rng.choice(order)
            num_turns += 1
            last_turn[version] = num_turns
            turns.take(version)
            if version == waiting and turns.num_running[version] < 2:
                turns.start(version)


def test_between_two_steps_of_its_own_no_version_waits_for_more_than_the_bound():
    rng = random.Random(0)
    for _ in range(300):
        names = "abcdefg"[: rng.randint(2, 7)]
        turns = turns_of({name: rng.choice([0, 0.001, 0.1, 0.5, 1, 50]) for name in names})
        taken(turns, 12)  # all of them came at once
        order = taken(turns, 60)
        for name in names:
            waits = [len(wait) for wait in order.split(name)]
            assert max(waits) <= max(MAX_APART, len(names) - 1), order
