"""A scheduler whose steps are read before the next one is scheduled, and a runner that reads back
what was written.
"""

from __future__ import annotations

from jaxinfer.config import SamplingParams, SchedulerConfig
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.sequence import Sequence
from tests.fakes import FakeRunner

SIZE = 4


class World:
    """A scheduler, a runner that reads back what was written, and no end but max_tokens."""

    def __init__(
        self,
        num_pages: int = 64,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 200,
        enable_prefix_caching: bool = True,
    ):
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        self.pool = PagePool(num_pages, SIZE, enable_prefix_caching)
        buckets = Buckets.for_limits(**limits, page_size=SIZE)
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.pool, buckets)
        self.runner = FakeRunner(num_pages, SIZE)
        self.num_submitted = 0

    def submit(self, token_ids, *, max_tokens: int | None = 4, version="v1", **changes) -> Sequence:
        self.num_submitted += 1
        request = Request(
            f"r{self.num_submitted}",
            tuple(token_ids),
            SamplingParams(max_tokens=max_tokens, temperature=0),
            **changes,
        )
        new = Sequence(request, index=0, seed=0, version=version)
        self.scheduler.submit(new)
        return new

    def step(self, now: float = 0.0) -> Scheduled:
        scheduled = self.scheduler.schedule(now)
        assert scheduled is not None
        result = self.runner.collect(self.runner.dispatch(scheduled.batch))
        assert self.runner.faults == []
        assert self.scheduler.update(scheduled, result, now) == []
        for each in scheduled.sampled:
            if each.num_tokens >= each.max_total_tokens:
                self.scheduler.finish(each)
        self.scheduler.check_integrity()
        return scheduled

    def drain(self, max_steps: int = 500) -> int:
        for num_steps in range(max_steps):
            if not self.scheduler.has_work():
                return num_steps
            self.step()
        raise AssertionError("still busy")


def prompt(start: int, length: int) -> list[int]:
    return [(start * 7 + i) % 101 for i in range(length)]
