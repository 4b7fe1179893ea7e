"""Tests of the two orders of those that wait."""

from __future__ import annotations

import pytest

from tests.scheduling.plain_world import World, prompt


@pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (64, 2), (65, 3), (129, 4)]
)
def test_a_size_is_a_doubling_from_half_a_budget_on(num_tokens, size):
    world = World(max_num_batched_tokens=32)
    assert world.submit(prompt(0, num_tokens)).turn[0] == size


def test_the_best_rank_and_the_first_in_turn_are_kept_apart():
    world = World(max_num_batched_tokens=32)
    waiting = world.scheduler._waiting
    assert (waiting.best, waiting.next) == (None, None)
    long, middle = world.submit(prompt(0, 100)), world.submit(prompt(1, 20))
    short, other = world.submit(prompt(2, 9)), world.submit(prompt(3, 3))
    assert (waiting.best, waiting.next) == (long, short)
    waiting.remove(short)
    assert (waiting.best, waiting.next) == (long, other)
    waiting.remove(other)
    waiting.remove(long)
    assert (waiting.best, waiting.next) == (middle, middle)
    assert short not in waiting
    assert len(waiting) == 1


def test_what_is_in_the_prefix_cache_does_not_make_a_prompt_long():
    world = World(max_num_batched_tokens=32)
    world.submit(prompt(0, 100))
    world.drain()
    assert world.submit(prompt(0, 100)).turn[0] == 0
    assert world.submit(prompt(0, 60) + prompt(50, 40)).turn[0] == 2


def test_a_preempted_one_has_all_its_tokens_to_compute():
    world = World(num_pages=9, max_num_batched_tokens=16)
    first, second = (world.submit(prompt(start, 8), max_tokens=16) for start in range(2))
    assert second.turn[0] == 0
    while not second.num_preemptions:
        world.step()
    assert 16 < second.num_tokens <= 32
    assert (first.turn[0], second.turn[0]) == (0, 2)
