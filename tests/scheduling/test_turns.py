"""Tests of who gets the tokens of a step: a long prompt delays no short one, and is not starved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.plain_world import SIZE, World, prompt
from tests.scheduling.plans import request
from tests.scheduling.world import Setup
from tests.scheduling.world import World as StrictWorld


def chunks(scheduled: Scheduled) -> dict[Sequence, int]:
    return dict(zip(scheduled.sequences, scheduled.rows.num_new.tolist(), strict=True))


@pytest.mark.parametrize("length", [1, 5, 16])
def test_a_short_prompt_is_whole_in_the_next_step_behind_a_long_one(length):
    world = World(max_num_batched_tokens=32)
    long = world.submit(prompt(0, 150), max_tokens=2)
    world.step()
    short = world.submit(prompt(1, length))
    assert chunks(world.step()) == {short: length, long: 32 - length}
    assert short.num_output_tokens == 1


def test_with_two_steps_under_way_the_third_has_the_short_prompt():
    world = World(max_num_batched_tokens=32)
    long = world.submit(prompt(0, 150), max_tokens=2)
    for _ in range(2):
        world.scheduler.schedule(0.0)
    short = world.submit(prompt(1, 10))
    scheduled = world.scheduler.schedule(0.0)
    assert scheduled is not None
    assert chunks(scheduled) == {short: 10, long: 22}


def test_a_prompt_waits_for_none_that_is_of_twice_its_size():
    world = World(max_num_batched_tokens=32)
    long = world.submit(prompt(0, 180), max_tokens=2)
    world.step()
    middle = world.submit(prompt(1, 30), max_tokens=2)
    assert chunks(world.step()) == {middle: 24, long: 8}
    assert chunks(world.step()) == {middle: 6, long: 26}


def test_prompts_of_one_size_come_in_the_order_of_their_rank():
    world = World(max_num_batched_tokens=32)
    first, second = (world.submit(prompt(start, 40), max_tokens=2) for start in range(2))
    assert chunks(world.step()) == {first: 32}
    assert chunks(world.step()) == {first: 8, second: 24}


def test_a_stream_of_short_prompts_leaves_the_long_one_a_quarter():
    world = World(max_num_batched_tokens=32, max_num_seqs=8)
    long = world.submit(prompt(0, 120), max_tokens=1)
    for number in range(2 * 15):
        world.submit(prompt(number + 1, 12), max_tokens=1)
    got = []
    while long.status is not Status.FINISHED:
        got.append(chunks(world.step())[long])
        for _ in range(2):
            world.submit(prompt(len(got) + 40, 12), max_tokens=1)
    assert got == [8] * 15


def test_the_share_goes_to_the_best_of_those_with_more_to_compute():
    world = World(max_num_batched_tokens=32)
    first, second = (world.submit(prompt(start, 150), max_tokens=2) for start in range(2))
    world.step()
    shorts = [world.submit(prompt(start, 12), max_tokens=1) for start in range(5, 9)]
    assert chunks(world.step()) == {shorts[0]: 12, shorts[1]: 12, first: 8}
    assert second.status is Status.WAITING


def test_a_better_class_takes_over_the_share_when_it_comes():
    world = World(max_num_batched_tokens=32)
    old = world.submit(prompt(0, 100), max_tokens=2, priority=1)
    world.step()
    new = world.submit(prompt(1, 100), max_tokens=2, priority=-1)
    assert chunks(world.step()) == {new: 32}
    assert (new.status, old.status) == (Status.RUNNING, Status.RUNNING)


def test_no_token_of_a_budget_is_left_idle():
    world = World(max_num_batched_tokens=32)
    for start, length in enumerate((150, 3, 90, 5, 40, 30)):
        world.submit(prompt(start, length), max_tokens=1)
    left = 150 + 3 + 90 + 5 + 40 + 30
    while left > 32:
        left -= int(world.step().rows.num_new.sum())
    assert left == (150 + 3 + 90 + 5 + 40 + 30) % 32


def test_a_short_prompt_starts_beside_a_long_one_only_in_pages_that_it_leaves():
    world = World(num_pages=30, max_num_batched_tokens=32)
    long = world.submit(prompt(0, 26 * SIZE), max_tokens=2)
    world.step()
    big = world.submit(prompt(1, 16), max_tokens=2)  # 4 pages; one is left for who runs
    small = world.submit(prompt(2, 8), max_tokens=2)
    world.step()
    assert (big.status, small.status) == (Status.WAITING, Status.WAITING)
    world.drain()
    assert [each.num_preemptions for each in (long, big, small)] == [0, 0, 0]


def test_a_cached_conversation_is_short_however_long_it_is():
    world = World(max_num_batched_tokens=32, num_pages=128)
    talk = prompt(0, 100)
    world.submit(talk, max_tokens=1)
    world.drain()
    long = world.submit(prompt(3, 150), max_tokens=2)
    world.step()
    more = world.submit([*talk, 7, 8, 9], max_tokens=2)
    assert chunks(world.step()) == {more: 3, long: 29}
    assert more.num_cached_tokens == 25 * SIZE


def test_one_that_was_preempted_goes_before_the_short_ones_behind_it():
    world = World(num_pages=9, max_num_seqs=8)
    first = world.submit(prompt(0, 8), max_tokens=16)
    second = world.submit(prompt(1, 8), max_tokens=16)
    while not second.num_preemptions:
        world.step()
    short = world.submit([3], max_tokens=2)
    while second.status is Status.PREEMPTED:
        assert short.status is Status.WAITING
        world.step()
    world.drain()
    assert [each.num_output_tokens for each in (first, second, short)] == [16, 16, 2]


def test_those_that_begin_again_after_a_failed_step_keep_their_turns():
    world = World(max_num_batched_tokens=8)
    first, second = (world.submit(prompt(start, 6)) for start in range(2))
    scheduled = world.scheduler.schedule(0.0)
    assert scheduled is not None
    world.scheduler.discard(scheduled)
    assert world.scheduler.retry([first, second]) == []
    short = world.submit([3])
    assert chunks(world.step()) == {first: 6, second: 2}
    assert chunks(world.step()) == {first: 1, short: 1, second: 4}


def test_the_token_of_one_that_gave_way_is_left_for_who_starts_in_its_seat():
    """Both seats and both tokens of a step are taken, and then the sixth and last page is."""
    world = StrictWorld(Setup(6, 1, max_num_seqs=2, max_num_batched_tokens=2, max_model_len=7))
    world.submit(replace(request("a", (1,), 6), arrival_s=0.0))
    world.submit(replace(request("b", (2,), 6), arrival_s=2.0))
    for _ in range(3):
        world.schedule()
        world.read()
    world.submit(replace(request("c", (3, 4), 2), arrival_s=1.0))
    world.schedule()
    gave_way, new = world.sequences["b"][0], world.sequences["c"][0]
    assert gave_way.status is Status.PREEMPTED
    assert (new.status, new.num_scheduled_tokens) == (Status.RUNNING, 1)


def test_the_next_of_many_waiting_is_found_without_a_look_at_the_others():
    world = World(max_num_batched_tokens=32, num_pages=128)
    world.submit(prompt(0, 190), max_tokens=2)
    world.step()
    for number in range(300):
        world.submit(prompt(number, 150))
    short = world.submit([5, 6, 7])
    looked_at: list[Any] = []
    match = world.pool.match
    world.pool.match = lambda sequence: looked_at.append(sequence) or match(sequence)
    assert short in world.step().sequences
    assert len(looked_at) <= 3
