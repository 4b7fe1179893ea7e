"""The scheduler under any order of events in pools of any size, against the laws of its states."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxinfer.config import SamplingParams
from jaxinfer.constraint import Mask
from jaxinfer.scheduling.page_pool import page_digest
from jaxinfer.scheduling.request import Request
from tests.scheduling.laws import check
from tests.scheduling.plans import same_digest
from tests.scheduling.world import MAX_UNDER_WAY, Setup, World, has_deadline

PROMPT = st.builds(
    lambda start, length, last: (*(i % 5 for i in range(start, start + length)), last),
    st.sampled_from([0, 0, 0, 3]),
    st.sampled_from([0, 2, 3, 4, 8, 15, 30]),
    st.integers(0, 2),
)


class Anything:
    """A grammar that admits every token, but has to have read each before the next."""

    is_complete = False

    def copy(self) -> Anything:
        return self

    def take(self, token_id: int) -> None: ...

    def prepare(self) -> None: ...

    def mask(self, *, may_end: bool) -> Mask:
        return np.full(1, -1, np.int32)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.one_of(st.integers(10, 30), st.integers(31, 200)),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 12),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 16, 40]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        digest=st.sampled_from([page_digest, page_digest, same_digest]),
        max_retries=st.sampled_from([0, 1, 2]),
        depth=st.sampled_from([1, 2, 2]),
    )
    def make(self, depth: int, **limits: Any) -> None:
        self.world = World(Setup(max_model_len=60, num_versions=3, **limits))
        self.depth = depth  # steps under way at most
        self.longest = self.world.scheduler.limit.max_total_tokens

    @rule(
        prompt=PROMPT,
        max_tokens=st.sampled_from([1, 2, 5, 5, 20]),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "", "s"]),
        patience_s=st.sampled_from([None, None, None, 25.0]),
        queue_s=st.sampled_from([None, None, 5.0]),
        constraint=st.sampled_from([None, None, Anything()]),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        n: int,
        priority: int,
        salt: str,
        patience_s: float | None,
        queue_s: float | None,
        constraint: Anything | None,
    ) -> None:
        world = self.world
        request = Request(
            str(len(world.sequences)),
            prompt[-(self.longest - 1) :],
            SamplingParams(max_tokens=max_tokens, n=n, temperature=0),
            arrival_s=world.now,
            priority=priority,
            deadline_s=None if patience_s is None else world.now + patience_s,
            queue_deadline_s=None if queue_s is None else world.now + queue_s,
            cache_salt=salt,
            constraint=constraint,
        )
        world.submit(request)

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.now += 1.0
            self.step()

    def step(self) -> None:
        """As the engine does: the next one is dispatched, then the oldest is read."""
        world = self.world
        is_step = len(world.flights) < self.depth and world.schedule()
        if world.flights and (len(world.flights) == self.depth or not is_step):
            world.read()

    @precondition(lambda self: len(self.world.flights) < MAX_UNDER_WAY)
    @rule(is_failing=st.sampled_from([False, False, True]))
    def dispatch(self, is_failing: bool) -> None:
        if is_failing:
            self.world.fail_dispatch()
        else:
            self.world.schedule()

    @precondition(lambda self: self.world.flights)
    @rule(data=st.data(), what=st.sampled_from(["end", "end", "end", "not a number", "fail"]))
    def read(self, data: st.DataObject, what: str) -> None:
        world = self.world
        if what == "fail":
            world.fail_read()
            return
        sampled = world.flights[0].scheduled.sampled
        some = data.draw(st.lists(st.sampled_from(sampled), unique_by=id)) if sampled else []
        world.read(**{"ended" if what == "end" else "broken": some})

    @rule()
    def lose_the_pool(self) -> None:
        self.world.lose_pool()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted({s.request.request_id for s in self.world.live}, key=int)
        self.world.abort(data.draw(st.sampled_from(live)))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), is_resumed=st.booleans())
    def pause_or_resume(self, data: st.DataObject, is_resumed: bool) -> None:
        scheduler = self.world.scheduler
        while len(self.world.flights) > 1:
            self.world.read()
        if not self.world.live:
            return
        change = scheduler.resume if is_resumed else scheduler.pause
        live = sorted({s.request.request_id for s in self.world.live}, key=int)
        change(data.draw(st.sampled_from(live)))

    @precondition(lambda self: any(has_deadline(s) for s in self.world.live))
    @rule()
    def expire(self) -> None:
        self.world.expire()

    @rule(version=st.sampled_from(["v1", "v2", "v3"]))
    def change_the_weights_version(self, version: str) -> None:
        self.world.version = version

    @invariant()
    def the_laws_hold(self) -> None:
        if hasattr(self, "world"):
            check(self.world)

    def teardown(self) -> None:
        """Whatever is live comes to its end, within a bound, and leaves nothing."""
        if not hasattr(self, "world") or sys.exc_info()[0] is not None:
            return  # a broken world would break more laws, and hide the first
        world = self.world
        for sequence in world.live:
            world.scheduler.resume(sequence.request.request_id)
        num_tokens = sum(s.max_total_tokens for s in world.live)
        num_preemptions = world.num_preemptions
        num_live = len(world.live)
        num_trials = sum(s.num_retries > 0 for s in world.live)  # each may preempt all others
        num_alone = sum(s.max_total_tokens for s in world.live if s.num_retries)  # not pipelined
        bound = 2 * (num_tokens + num_alone) + (4 + num_trials) * num_live + 4
        for _ in range(bound):
            if not world.live and not world.flights:
                break
            self.step()
        assert not world.live, f"still busy after {bound} steps"
        assert world.num_preemptions - num_preemptions <= num_tokens + num_trials * num_live
        check(world)


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_orders_of_events():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=2000, stateful_step_count=50, deadline=None, derandomize=True
        ),
    )
