"""Tests of what a step changes when it is scheduled, and what only when it is read."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import SamplingParams, SchedulerConfig
from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.sequence import Sequence, Status

SIZE = 4


class World:
    """A scheduler whose steps are read when a test says so, with the tokens that it says."""

    def __init__(self, num_pages: int = 32, max_num_seqs: int = 4):
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
        }
        self.pool = PagePool(num_pages, SIZE)
        buckets = Buckets.for_limits(**limits, page_size=SIZE)
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.pool, buckets)

    def submit(self, length: int, *, start: int = 0, arrival_s: float = 0.0) -> Sequence:
        sampling = SamplingParams(max_tokens=20, temperature=0)
        request = Request(f"{start}", (*range(start, start + length),), sampling, arrival_s)
        new = Sequence(request, index=0, seed=0, version="v1")
        self.scheduler.submit(new)
        return new

    def schedule(self) -> Scheduled:
        scheduled = self.scheduler.schedule(0.0)
        assert scheduled is not None
        self.scheduler.check_integrity()
        return scheduled

    def read(self, scheduled: Scheduled, *tokens: int, nan_rows: tuple[int, ...] = ()):
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[list(nan_rows)] = np.nan
        result = StepResult(np.array(tokens, np.int32), logprobs, None, None)
        broken = self.scheduler.update(scheduled, result, 1.0)
        self.scheduler.check_integrity()
        return broken


def counters(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.num_scheduled_tokens, sequence.num_computed_tokens, len(sequence.token_ids)


def test_scheduling_counts_on_a_step_and_reading_confirms_it():
    world = World()
    only = world.submit(6)
    first = world.schedule()
    assert counters(only) == (6, 0, 6)
    second = world.schedule()  # of a token that nobody knows yet
    assert counters(only) == (7, 0, 6)
    world.read(first, 50)
    assert counters(only) == (7, 6, 7)
    world.read(second, 51)
    assert counters(only) == (7, 7, 8)
    assert only.token_ids[6:].tolist() == [50, 51]


def test_pages_are_indexed_when_the_step_that_filled_them_is_read():
    world = World()
    world.submit(9)
    first = world.schedule()
    second = world.schedule()
    assert len(world.pool.index) == 0
    world.read(first, 50)
    assert len(world.pool.index) == 2
    world.read(second, 51)
    assert len(world.pool.index) == 2


def test_steps_are_read_in_the_order_in_which_they_were_scheduled():
    world = World()
    world.submit(6)
    world.schedule()
    second = world.schedule()
    with pytest.raises(AssertionError, match="order"):
        world.read(second, 1)


def test_one_that_ended_takes_nothing_from_the_step_under_way():
    world = World()
    gone, kept = world.submit(6, start=0), world.submit(7, start=10)
    first = world.schedule()
    second = world.schedule()
    world.read(first, 50, 51)
    assert second.sampled == [gone, kept]
    world.scheduler.finish(gone)
    newcomer = world.submit(5, start=30)
    third = world.schedule()  # the newcomer has the seat of the one that ended
    world.read(second, 60, 61)
    assert gone.token_ids[6:].tolist() == [50]
    assert kept.token_ids[7:].tolist() == [51, 61]
    assert counters(newcomer) == (5, 0, 5)
    world.read(third, *([70] * len(third.sampled)))
    assert counters(newcomer) == (5, 5, 6)


def test_a_preempted_one_takes_its_token_and_nothing_else():
    world = World(num_pages=4)
    first, second = world.submit(7, start=0), world.submit(7, start=20)
    steps = [world.schedule()]
    while second.status is Status.RUNNING:
        steps.append(world.schedule())
        if second.status is Status.RUNNING:
            last = steps.pop(0)
            world.read(last, *range(len(last.sampled)))
    assert second.is_awaited
    num_known = len(second.token_ids)
    world.read(steps[0], *([77] * len(steps[0].sampled)))
    assert second.token_ids[num_known:].tolist() == [77]
    assert not second.is_awaited
    assert second.num_computed_tokens == 0
    assert first.status is Status.RUNNING


def test_an_awaited_one_does_not_start_before_its_token_is_known():
    world = World(num_pages=16)
    only = world.submit(6)
    first = world.schedule()
    world.scheduler._seating.preempt(only)
    assert only.is_awaited
    assert world.scheduler.schedule(0.0) is None
    world.read(first, 50)
    scheduled = world.schedule()
    assert scheduled.rows.num_new.tolist() == [7]


def test_rows_that_are_no_numbers_get_no_token_and_index_no_page():
    world = World()
    good, bad = world.submit(4, start=0), world.submit(4, start=20)
    first = world.schedule()
    assert world.read(first, 50, 51, nan_rows=(1,)) == [bad]
    assert (len(good.token_ids), len(bad.token_ids)) == (5, 4)
    assert len(world.pool.index) == 1


def test_the_first_token_is_timed_when_it_is_read():
    world = World()
    only = world.submit(6)
    first = world.schedule()
    second = world.schedule()
    assert only.first_token_s is None
    assert first.firsts == (only,)
    world.read(first, 50)
    assert only.first_token_s == 1.0
    world.read(second, 51)
    third = world.schedule()
    assert third.firsts == ()


def test_one_whose_last_token_is_on_its_way_is_not_scheduled():
    world = World()
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=2, temperature=0))
    world.scheduler.submit(Sequence(request, index=0, seed=0, version="v1"))
    world.schedule()
    world.schedule()
    assert world.scheduler.schedule(0.0) is None
    assert world.scheduler.has_work()


def test_equal_prompts_wait_for_a_page_that_is_under_way():
    world = World()
    first, second = world.submit(9), world.submit(9)
    step = world.schedule()
    assert step.sequences == [first]
    assert world.schedule().sequences == [first]
    world.read(step, 50)
    assert set(world.schedule().sequences) == {first, second}
    assert second.num_cached_tokens == 8
