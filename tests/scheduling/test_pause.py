"""Tests of requests that are paused because nobody reads them, and resumed."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.laws import check
from tests.scheduling.plans import request
from tests.scheduling.world import Setup, World

SETUP = Setup(num_pages=12, page_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=16)


def a_world(*, deadline_s: float | None = None) -> tuple[World, Sequence, Sequence]:
    """One that runs, and another that has not begun."""
    world = World(SETUP)
    world.submit(replace(request("a", (1, 2, 3), 6), deadline_s=deadline_s))
    world.schedule()
    world.read()
    world.submit(request("b", (4, 5, 6), 6))
    return world, world.sequences["a"][0], world.sequences["b"][0]


def to_the_end(world: World) -> None:
    while world.live:
        world.schedule()
        if world.flights:
            world.read()
        check(world)


def test_a_paused_one_gives_its_pages_back_and_is_in_no_queue():
    world, running, waiting = a_world()
    world.scheduler.pause("a")
    world.scheduler.pause("b")
    check(world)
    assert running.status is waiting.status is Status.PAUSED
    assert world.scheduler.pool.num_used == 0
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 2)
    assert not world.scheduler.has_work()


def test_a_resumed_one_says_what_it_would_have_said():
    world, running, waiting = a_world()
    for request_id in ("a", "b"):
        world.scheduler.pause(request_id)
        world.scheduler.resume(request_id)
    assert (running.status, waiting.status) == (Status.PREEMPTED, Status.WAITING)
    to_the_end(world)  # the world compares every token with those of the sequence alone
    assert (running.num_output_tokens, waiting.num_output_tokens) == (6, 6)


def test_a_pause_is_no_preemption():
    world, running, _ = a_world()
    world.scheduler.pause("a")
    world.scheduler.resume("a")
    to_the_end(world)
    assert running.num_preemptions == world.scheduler.stats().num_preemptions == 0


def test_others_run_on_while_one_is_paused():
    world, running, waiting = a_world()
    world.scheduler.pause("a")
    while waiting.status is not Status.FINISHED:
        world.schedule()
        world.read()
        check(world)
    assert (running.status, running.num_output_tokens) == (Status.PAUSED, 1)


def test_a_paused_one_takes_the_token_that_was_on_its_way():
    world, running, _ = a_world()
    world.schedule()
    world.scheduler.pause("a")
    check(world)
    world.read()
    assert running.num_output_tokens == 2
    check(world)
    world.scheduler.resume("a")
    to_the_end(world)
    assert running.num_output_tokens == 6


def test_a_paused_one_ends_at_its_deadline_or_when_it_is_aborted():
    world, running, waiting = a_world(deadline_s=10.0)
    for request_id in ("a", "b"):
        world.scheduler.pause(request_id)
    world.expire()
    world.abort("b")
    check(world)
    assert running.status is waiting.status is Status.FINISHED
    assert world.scheduler.stats().num_paused == 0


def test_pausing_or_resuming_twice_or_what_is_not_there_does_nothing():
    world, running, _ = a_world()
    for change in (world.scheduler.pause, world.scheduler.resume):
        for request_id in ("a", "a", "nobody"):
            change(request_id)
            check(world)
    world.scheduler.resume("b")
    to_the_end(world)
    assert running.status is Status.FINISHED


def test_a_token_that_comes_while_one_is_paused_is_progress_after_a_failure():
    world, running, _ = a_world()
    world.schedule()
    world.fail_read()
    assert running.num_retries == 1
    while running.status is not Status.RUNNING:
        world.schedule()
        if running.status is not Status.RUNNING:
            world.read()
    world.scheduler.pause("a")
    check(world)
    world.read()
    check(world)
    assert running.num_retries == 0


def test_a_paused_one_keeps_its_count_over_failures_and_lost_pools():
    world, running, _ = a_world()
    world.schedule()
    world.scheduler.pause("a")
    world.fail_read()
    check(world)
    world.lose_pool()
    check(world)
    assert (running.num_retries, running.status) == (1, Status.PAUSED)
    world.scheduler.resume("a")
    check(world)
    to_the_end(world)
    assert running.num_output_tokens == 6


def test_one_that_is_resumed_before_its_trial_was_read_waits_like_others_when_it_was():
    world = World(replace(SETUP, max_retries=1))
    world.submit(request("a", (1, 2, 3), 6))
    world.schedule()
    world.fail_read()
    world.schedule()
    assert world.scheduler.trial is world.sequences["a"][0]
    world.scheduler.pause("a")
    world.scheduler.resume("a")
    check(world)
    world.read()
    check(world)
    to_the_end(world)
    assert world.sequences["a"][0].num_output_tokens == 6
