"""Worlds that are one state, and worlds that are not."""

from __future__ import annotations

import pytest

from tests.scheduling.exploration import Plan
from tests.scheduling.plans import LONG, SETUP
from tests.scheduling.snapshots import Snapshots
from tests.scheduling.state_key import state_key
from tests.scheduling.world import World

PLAN = Plan(SETUP, LONG, frozenset())


def world_after(*events: str) -> World:
    """`events`: a name and what it is about, as in "abort a"."""
    world = World(SETUP)
    for event in events:
        PLAN.apply(world, tuple(event.split()))
    return world


def test_other_pages_and_another_seat_are_the_same_state():
    straight = world_after("submit b", "schedule", "read", "abort b", "submit a")
    roundabout = world_after("submit b", "schedule", "read", "submit a", "abort b")
    assert straight.sequences["a"][0].page_table == roundabout.sequences["a"][0].page_table == []
    assert state_key(straight) == state_key(roundabout)
    pages = [world.scheduler.pool._free.copy() for world in (straight, roundabout)]
    roundabout.scheduler.pool._free.reverse()
    for world in (straight, roundabout):
        world.schedule()
    assert pages[0] == pages[1]
    tables = [world.sequences["a"][0].page_table for world in (straight, roundabout)]
    assert tables[0] != tables[1]
    assert state_key(straight) == state_key(roundabout)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("submit a", "submit b"), ("submit b", "submit a")),
        (("submit a", "schedule"), ("submit a",)),
        (("submit a", "schedule", "read"), ("submit a", "schedule")),
        (("submit a", "schedule", "abort a"), ("submit a", "abort a")),
        (("submit a", "abort a"), ("submit b", "abort b")),
        # What a prompt finds cached when it comes decides its turn.
        (
            ("submit b", "submit a", "schedule", "read", "abort b"),
            ("submit b", "schedule", "read", "submit a", "abort b"),
        ),
    ],
)
def test_what_differs_in_its_future_is_another_state(one, other):
    assert state_key(world_after(*one)) != state_key(world_after(*other))


def test_the_order_of_eviction_is_part_of_the_state():
    world = world_after("submit a", "submit c", *["schedule", "read"] * 4)
    before = state_key(world)
    cached = world.scheduler.pool._cached
    assert len(cached) > 1
    cached.move_to_end(next(iter(cached)))
    assert state_key(world) != before


def test_a_thawed_world_goes_on_alone():
    world, snapshots = world_after("submit a", "submit c", "schedule"), Snapshots()
    frozen = snapshots.freeze(world)
    before = state_key(world)
    copies = [snapshots.thaw(frozen) for _ in range(2)]
    copies[0].read()
    copies[0].schedule()
    assert state_key(copies[0]) != before
    assert state_key(copies[1]) == state_key(world) == before
    assert copies[1].flights[0].scheduled.batch is world.flights[0].scheduled.batch
