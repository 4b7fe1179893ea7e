"""Tests of which version of the weights has the next step."""

from __future__ import annotations

from jaxinfer.scheduling.version_turns import VersionTurns


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
