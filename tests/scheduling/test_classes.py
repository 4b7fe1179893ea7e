"""Tests of who gives way to a better class that waits, for its seat and for its pages."""

from __future__ import annotations

from jaxinfer.scheduling.rank import AGING_S
from jaxinfer.scheduling.seating import MAX_GIVING_WAY
from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.plain_world import SIZE, World, prompt

BATCH, NORMAL, INTERACTIVE = 1, 0, -1


def full(num_seats: int, *, priority: int = BATCH) -> tuple[World, list[Sequence]]:
    """All seats are taken, by sequences that decode."""
    world = World(max_num_seqs=num_seats)
    running = [
        world.submit(prompt(start, 3), max_tokens=60, priority=priority, arrival_s=start)
        for start in range(num_seats)
    ]
    world.step()
    return world, running


def test_the_worst_of_the_lowest_class_gives_its_seat_to_a_better_class():
    world, batch = full(2)
    new = world.submit(prompt(9, 3), priority=INTERACTIVE, arrival_s=5.0)
    assert new in world.step().sequences
    assert new.num_output_tokens == 1
    assert [each.status for each in batch] == [Status.RUNNING, Status.PREEMPTED]
    world.drain()
    assert [each.num_output_tokens for each in batch] == [60, 60]
    assert [each.num_preemptions for each in batch] == [0, 1]


def test_of_two_classes_the_lower_gives_way():
    world = World(max_num_seqs=2)
    low = world.submit(prompt(0, 3), max_tokens=9, priority=BATCH, arrival_s=0.0)
    late = world.submit(prompt(1, 3), max_tokens=9, priority=NORMAL, arrival_s=9.0)
    world.step()
    world.submit(prompt(2, 3), priority=INTERACTIVE, arrival_s=10.0)
    world.step()
    assert (low.status, late.status) == (Status.PREEMPTED, Status.RUNNING)


def test_nobody_gives_way_to_its_own_class():
    world, running = full(2, priority=NORMAL)
    early = world.submit(prompt(9, 3), priority=NORMAL, arrival_s=-5.0)
    world.step()
    assert early.status is Status.WAITING
    assert all(each.status is Status.RUNNING for each in running)


def test_nobody_gives_way_to_a_better_class_that_came_too_late():
    world, (old,) = full(1)
    new = world.submit(prompt(9, 3), priority=NORMAL, arrival_s=AGING_S + 0.1)
    world.step()
    assert (old.status, new.status) == (Status.RUNNING, Status.WAITING)
    newer = world.submit(prompt(8, 3), priority=INTERACTIVE, arrival_s=2 * AGING_S - 0.1)
    world.step()
    assert (old.status, newer.status) == (Status.PREEMPTED, Status.RUNNING)


def test_who_gave_way_does_not_again_before_it_has_drawn_a_token():
    world, (old,) = full(1)
    first = world.submit(prompt(8, 3), max_tokens=1, priority=INTERACTIVE)
    world.step()
    assert (first.status, old.num_preemptions) == (Status.FINISHED, 1)
    scheduled = world.scheduler.schedule(0.0)
    assert scheduled is not None
    assert scheduled.sequences == [old]
    assert world.scheduler.running.has_drawn(old)
    for _ in range(40):  # an answer of one token each time the old one has drawn its own
        world.submit(prompt(9, 3), max_tokens=1, priority=INTERACTIVE)
    num_tokens = old.num_output_tokens
    result = world.runner.collect(world.runner.dispatch(scheduled.batch))
    world.scheduler.update(scheduled, result, 0.0)
    world.drain()
    assert old.num_output_tokens == 60 > num_tokens
    assert old.num_preemptions <= 2


def test_a_long_prompt_that_gave_way_once_is_then_left_to_finish():
    world = World(max_num_seqs=1, max_num_batched_tokens=16, enable_prefix_caching=False)
    long = world.submit(prompt(0, 60), max_tokens=2, priority=BATCH)
    world.step()
    first = world.submit(prompt(1, 3), max_tokens=1, priority=INTERACTIVE)
    assert world.step().sequences == [first]
    world.step()
    second = world.submit(prompt(2, 3), max_tokens=1, priority=INTERACTIVE)
    while long.num_output_tokens == 0:
        assert second.status is Status.WAITING
        world.step()
    assert world.step().sequences == [second]
    world.drain()
    assert long.num_preemptions == 2


def test_only_so_many_give_way_in_one_step():
    world, batch = full(MAX_GIVING_WAY + 2)
    new = [
        world.submit(prompt(start, 3), max_tokens=9, priority=INTERACTIVE)
        for start in range(50, 50 + len(batch))
    ]
    world.step()
    assert [each.status is Status.RUNNING for each in new].count(True) == MAX_GIVING_WAY
    world.step()
    assert all(each.status is Status.RUNNING for each in new)
    world.drain()


def test_a_better_class_takes_pages_to_start_from_as_many_as_it_takes():
    world = World(num_pages=12, max_num_seqs=4)
    batch = [
        world.submit(prompt(start, 3 * SIZE), max_tokens=4, priority=BATCH) for start in range(2)
    ]
    other = world.submit(prompt(3, 3 * SIZE), max_tokens=4, priority=NORMAL)
    world.step()
    new = world.submit(prompt(9, 7 * SIZE), max_tokens=2, priority=INTERACTIVE)
    assert set(world.step().sequences) == {other, new}
    assert all(each.status is Status.PREEMPTED for each in batch)
    world.drain()


def test_nobody_gives_way_if_that_is_not_enough():
    world = World(num_pages=12, max_num_seqs=4)
    batch = world.submit(prompt(0, 3 * SIZE), max_tokens=4, priority=BATCH)
    better = [
        world.submit(prompt(start, 3 * SIZE), max_tokens=4, priority=INTERACTIVE)
        for start in (1, 2)
    ]
    world.step()
    new = world.submit(prompt(9, 7 * SIZE), max_tokens=2, priority=INTERACTIVE)
    assert set(world.step().sequences) == {batch, *better}
    assert new.status is Status.WAITING
    world.drain()
    assert batch.num_preemptions <= 1


def test_pages_that_both_have_are_not_counted_twice():
    world = World(num_pages=6, max_num_seqs=2)
    start = prompt(0, 3 * SIZE)
    batch = world.submit([*start, 1], max_tokens=3, priority=BATCH)
    world.step()
    new = world.submit(start + prompt(9, 2 * SIZE), max_tokens=2, priority=INTERACTIVE)
    scheduled = world.step()
    assert new in scheduled.sequences
    assert new.num_cached_tokens == 3 * SIZE
    world.drain()
    assert batch.num_output_tokens == 3


def test_an_old_batch_request_comes_before_new_interactive_ones():
    world = World(max_num_seqs=1)
    old = world.submit(prompt(0, 3), max_tokens=1, priority=BATCH, arrival_s=0.0)
    order = []
    now = 0.0
    while old.status is not Status.FINISHED:
        for _ in range(2):
            world.submit(prompt(int(now), 3), max_tokens=1, priority=INTERACTIVE, arrival_s=now)
        now += 1.0
        order += world.step(now).sequences
    later = [each.request.arrival_s for each in order if each is not old]
    assert max(later) < 2 * AGING_S <= now + max(later)
    assert old.num_preemptions == 0


def test_a_step_of_another_version_takes_seats_too():
    world, (old,) = full(1)
    new = world.submit(prompt(9, 3), priority=INTERACTIVE, version="v2")
    assert world.step().sequences == [new]
    assert old.status is Status.PREEMPTED
    world.drain()
