"""Tests of who gives way, and who waits, where pages are short."""

from __future__ import annotations

import pytest

from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.plain_world import SIZE, World, prompt


def test_the_latest_of_the_lowest_class_is_preempted():
    world = World(num_pages=7, max_num_seqs=3)
    high_late = world.submit(prompt(2, SIZE * 2), max_tokens=9, priority=0, arrival_s=2.0)
    low = world.submit(prompt(0, SIZE * 2), max_tokens=9, priority=1, arrival_s=0.0)
    high = world.submit(prompt(1, SIZE * 2), max_tokens=9, priority=0, arrival_s=1.0)
    while world.scheduler.stats().num_preemptions == 0:
        world.step()
    assert low.status is Status.PREEMPTED
    assert (high.status, high_late.status) == (Status.RUNNING, Status.RUNNING)
    assert low.page_table == []
    world.drain()


def too_small_a_pool_for_two() -> tuple[World, Sequence, Sequence]:
    """9 pages for two sequences that need 6 each in the end."""
    world = World(num_pages=9)
    first = world.submit(prompt(0, 8), max_tokens=16)
    return world, first, world.submit(prompt(1, 8), max_tokens=16)


@pytest.mark.parametrize("num_pages", [7, 8, 9, 10, 11])
def test_two_that_exceed_the_pool_finish_without_thrash(num_pages):
    world = World(num_pages=num_pages)
    first, second = (world.submit(prompt(start, 8), max_tokens=16) for start in range(2))
    assert world.drain() <= 2 * 16 + 4
    assert first.num_preemptions == 0
    assert second.num_preemptions <= 1
    assert (first.num_output_tokens, second.num_output_tokens) == (16, 16)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_crowd_in_a_small_pool_finishes_with_few_preemptions(enable_prefix_caching):
    world = World(
        num_pages=12, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=16
    )
    crowd = [world.submit(prompt(i, 5 + i), max_tokens=20) for i in range(8)]
    steps = world.drain()
    assert steps <= 4 * 8 * 21
    assert max(each.num_preemptions for each in crowd) <= 4
    assert all(each.num_output_tokens == 20 for each in crowd)


def test_a_preempted_sequence_resumes_with_room_to_go_on():
    world, _, second = too_small_a_pool_for_two()
    while second.status is not Status.PREEMPTED:
        world.step()
    at_preemption = second.num_tokens
    while second.status is not Status.RUNNING:
        world.step()
    assert second.num_tokens > at_preemption
    assert len(second.page_table) * SIZE >= at_preemption


def test_a_resumed_sequence_takes_back_what_is_still_cached():
    world, _, second = too_small_a_pool_for_two()
    while second.status is not Status.PREEMPTED:
        world.step()
    scheduled = world.step()
    while second.status is not Status.RUNNING:
        scheduled = world.step()
    place = scheduled.sequences.index(second)
    assert scheduled.rows.num_new[place] < second.num_tokens - 1
    assert second.num_cached_tokens == 0  # of its prompt, when it first ran


def test_the_worst_sequence_keeps_its_pages_when_it_finds_no_more():
    world, first, second = too_small_a_pool_for_two()
    while second in (scheduled := world.step()).sequences:
        pass
    assert scheduled.sequences == [first]  # the second found no page and skips the step
    assert second.status is Status.RUNNING
    assert len(second.page_table) == 4


def test_a_new_sequence_does_not_take_the_last_pages_of_those_that_run():
    world = World(num_pages=16, max_num_seqs=4)
    world.submit(prompt(0, 28), max_tokens=9)
    world.step()
    late = world.submit(prompt(1, 24), max_tokens=2)
    world.step()
    later = world.submit(prompt(2, 1), max_tokens=2)
    world.step()
    assert late.status is Status.FINISHED
    assert later.status is Status.WAITING  # there was one page, for the one that runs to go on
    world.drain()


def test_pages_that_a_running_prompt_still_needs_are_not_given_away():
    world = World(num_pages=24, max_num_batched_tokens=32)
    first = world.submit(prompt(0, 80), max_tokens=2)
    world.step()
    world.submit(prompt(1, 16), max_tokens=2)
    world.drain()
    assert first.num_preemptions == 0
