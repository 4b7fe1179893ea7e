"""Tests of the order of what runs, and of the seats at the running table."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.running import Running
from jaxinfer.scheduling.running_table import RunningTable
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.version_turns import VersionTurns

SIZE = 4


class World:
    def __init__(self, num_seats: int = 4) -> None:
        self.table = RunningTable(num_seats, max_pages_per_seq=8, page_size=SIZE)
        self.turns = VersionTurns()
        self.running = Running(self.table, self.turns)

    def start(
        self, rank: float, *, version: str = "v1", num_computed: int = 0, priority: int = 0
    ) -> Sequence:
        request = Request("r", (1, 2, 3, 4, 5), priority=priority)
        new = Sequence(request, index=0, seed=0, version=version)
        new.rank = (rank, int(rank))
        new.page_table = [int(rank), int(rank) + 10]
        self.running.start(new, num_computed)
        return new


def test_the_best_rank_comes_first_and_the_worst_gives_way():
    world = World()
    second, first, third = world.start(2), world.start(1), world.start(3)
    assert list(world.running) == [first, second, third]
    assert world.running.giving_way_to(first) is third
    assert world.running.giving_way_to(third) is None
    assert world.table.sequences(world.running.seats("v1")) == [first, second, third]
    world.running.check_integrity()


def test_the_lowest_class_gives_way_first_and_in_it_the_worst_rank():
    world = World()
    old, low, lower, new = (
        world.start(rank, priority=priority) for rank, priority in ((1, 1), (2, 1), (3, 1), (4, 0))
    )
    assert world.running.lowest_class == 1
    assert world.running.giving_way_to(old) is lower
    assert world.running.giving_way_to(lower) is new  # of a better class, but nobody else is worse
    assert world.running.giving_way_to(new) is None
    for each in (old, low, lower):
        world.running.stop(each)
    assert world.running.lowest_class == 0
    world.running.check_integrity()


def test_nobody_runs_in_no_class():
    assert World().running.lowest_class < -1000


def test_who_has_more_to_compute_is_far_until_it_has_drawn():
    world = World()
    near, far = world.start(2, num_computed=4), world.start(1)
    assert world.running.far() == [far]
    world.table.has_drawn[near.seat] = True
    assert [world.running.has_drawn(each) for each in (near, far)] == [True, False]


def test_who_stops_gives_its_pages_back_and_its_seat_to_the_next():
    world = World(num_seats=1)
    first = world.start(1)
    seat = first.seat
    assert world.running.stop(first) == [1, 11]
    assert (len(world.running), first.page_table, first.seat) == (0, [], -1)
    assert world.start(2).seat == seat
    world.running.check_integrity()


@pytest.mark.parametrize(("num_scheduled", "is_awaited"), [(0, False), (4, False), (5, True)])
def test_who_stops_with_all_tokens_scheduled_has_one_on_its_way(num_scheduled, is_awaited):
    world = World()
    only = world.start(1)
    world.table.num_scheduled[only.seat] = num_scheduled
    world.running.stop(only)
    assert only.is_awaited is is_awaited


def test_seats_are_those_of_one_version():
    world = World()
    old, new, other = world.start(1), world.start(2, version="v2"), world.start(3)
    assert world.table.sequences(world.running.seats("v1")) == [old, other]
    assert world.table.sequences(world.running.seats("v2")) == [new]
    world.running.stop(new)
    assert world.table.sequences(world.running.seats("v1")) == [old, other]
    assert world.running.seats("v2").tolist() == []


def test_a_seat_begins_with_what_the_sequence_brings():
    world = World()
    only = world.start(1, num_computed=3)
    table, seat = world.table, only.seat
    assert (table.num_scheduled[seat], table.num_computed[seat]) == (3, 3)
    assert (table.room[seat], bool(table.is_far[seat])) == (2 * SIZE, True)
    assert not table.has_drawn[seat]
    assert only.status is Status.RUNNING
    table.add_pages(only, [7])
    assert (table.room[seat], only.page_table) == (3 * SIZE, [1, 11, 7])
    assert table.page_table[seat].tolist() == [1, 11, 7, 0, 0, 0, 0, 0]


def spoil_room(world: World) -> None:
    world.table.room[0] += 1


def spoil_pages(world: World) -> None:
    world.table.page_table[0, 1] = 9


def spoil_the_rest_of_a_line(world: World) -> None:
    world.table.page_table[0, 7] = 1


def spoil_far(world: World) -> None:
    world.table.is_far[0] = False


def spoil_counters(world: World) -> None:
    world.table.num_computed[0] = 2


def spoil_versions(world: World) -> None:
    world.turns.start("v1")


def spoil_seats(world: World) -> None:
    world.running._seats = np.array([3], np.intp)


def spoil_status(world: World) -> None:
    next(iter(world.running)).status = Status.WAITING


def spoil_classes(world: World) -> None:
    world.running._num_of_class[1] += 1


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_room,
        spoil_pages,
        spoil_the_rest_of_a_line,
        spoil_far,
        spoil_counters,
        spoil_versions,
        spoil_seats,
        spoil_status,
        spoil_classes,
    ],
)
def test_a_table_that_disagrees_with_its_sequences_is_noticed(spoil):
    world = World()
    assert world.start(1).seat == 0
    world.running.check_integrity()
    spoil(world)
    with pytest.raises(AssertionError):
        world.running.check_integrity()
