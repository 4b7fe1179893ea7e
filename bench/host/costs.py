"""What an engine's own work costs per step, beside a runner that draws random words at no cost.

No device and no JAX: the engine, its scheduler and a real tokenizer, timed in parts by the CPU time
of this thread, which other processes disturb least.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.workloads import word_ids
from jaxinfer.config import SamplingParams, SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import EngineFailure
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.tokenizer import Tokenizer

PAGE_SIZE, MAX_MODEL_LEN, MAX_BATCHED_TOKENS = 64, 4096, 2048
PROMPT_TOKENS = (20, 600)  # from, to
PAGES_PER_RUNNING = 32  # room for all, and for what stays cached
Clock = Callable[[], float]


@dataclass(slots=True)
class StepCosts:
    """Seconds of one call of `Engine.step`, by part."""

    schedule_s: float = 0.0  # choose, allocate pages, build the batch
    update_s: float = 0.0  # note tokens, index pages
    detokenize_s: float = 0.0  # text, end conditions, outputs, and the loop around it all
    kinds: list[str] = field(default_factory=list[str])  # of the step that was scheduled
    num_rows: int = 0  # of the step that was read

    @property
    def all_s(self) -> float:
        return self.schedule_s + self.update_s + self.detokenize_s


class TimedScheduler(Scheduler):
    """Notes into `costs` what its two halves of a step take."""

    clock: Clock
    costs: StepCosts

    def schedule(self, now: float) -> Scheduled | None:
        started = self.clock()
        scheduled = super().schedule(now)
        self.costs.schedule_s += self.clock() - started
        return scheduled

    def update(self, scheduled: Scheduled, result: StepResult, now: float) -> list[Sequence]:
        started = self.clock()
        broken = super().update(scheduled, result, now)
        self.costs.update_s += self.clock() - started
        return broken


class WordRunner:
    """A device that draws from these words, and notes how long that took."""

    def __init__(self, words: list[int], seed: int, clock: Clock):
        self._words = np.array(words, np.int32)
        self._random = np.random.default_rng(seed)
        self._clock = clock
        self.costs = StepCosts()
        self.seconds = 0.0

    def dispatch(self, batch: Batch) -> Batch:
        self.costs.kinds.append(batch.kind)
        return batch

    def collect(self, pending: Batch) -> StepResult:
        started, number = self._clock(), pending.num_sampled
        self.costs.num_rows = number
        token_ids = self._random.choice(self._words, number)
        result = StepResult(token_ids, np.zeros(number, np.float32), None, None)
        self.seconds += self._clock() - started
        return result

    def rebuild(self) -> None:
        raise EngineFailure("a device that is measured loses nothing")

    def drop_version(self, version: str) -> None:
        raise EngineFailure("a device that is measured keeps its version")


class HostWorld:
    """An engine with `num_running` sequences at work and `num_waiting` behind them.

    Args:
        num_output: tokens of an answer, from and to.
        clock: seconds of this thread's CPU time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_running: int,
        num_waiting: int,
        num_output: tuple[int, int],
        clock: Clock,
        seed: int = 0,
    ):
        limits = {
            "max_num_seqs": num_running,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
        }
        pool = PagePool(num_running * PAGES_PER_RUNNING, PAGE_SIZE)
        buckets = Buckets.for_limits(**limits, page_size=PAGE_SIZE)
        self._scheduler = TimedScheduler(SchedulerConfig(**limits), pool, buckets)
        self._scheduler.clock = self._clock = clock
        self._words = word_ids(tokenizer)
        self._runner = WordRunner(self._words, seed, clock)
        self._random = np.random.default_rng(seed)
        self._num_output, self._num_waiting = num_output, num_waiting
        self._num_submitted = 0
        self.engine = Engine(
            runner=self._runner,
            make_scheduler=lambda: self._scheduler,
            tokenizer=tokenizer,
            version="v1",
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            random_seed=lambda: self._num_submitted,
            clock=lambda: 0.0,  # no step is long, however busy the machine is
        )
        self._fill(num_running + num_waiting)
        while self.engine.pool_stats().num_running < num_running:
            self.step()

    def _fill(self, number: int) -> None:
        for _ in range(number):
            self._num_submitted += 1
            words = self._random.choice(self._words, self._random.integers(*PROMPT_TOKENS))
            max_tokens = int(self._random.integers(*self._num_output))
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.7)
            self.engine.submit(Request(str(self._num_submitted), tuple(words.tolist()), sampling))

    def step(self) -> StepCosts:
        """One step, and as many new requests as have started in it."""
        costs = StepCosts()
        self._scheduler.costs = self._runner.costs = costs
        self._runner.seconds = 0.0
        started = self._clock()
        self.engine.step()
        whole = self._clock() - started - self._runner.seconds
        costs.detokenize_s = whole - costs.schedule_s - costs.update_s
        self._fill(self._num_waiting - self.engine.pool_stats().num_waiting)
        return costs

    def steps(self, number: int) -> list[StepCosts]:
        """The costs of so many steps, after a few that are not counted."""
        for _ in range(50):
            self.step()
        gc.collect()
        gc.freeze()
        try:
            return [self.step() for _ in range(number)]
        finally:
            gc.unfreeze()


def digest_s_per_token(num_tokens: int, clock: Clock) -> float:
    """Seconds per token of the digests that find a prefix of `num_tokens`."""
    pool = PagePool(1, PAGE_SIZE)
    tokens = np.random.default_rng(0).integers(0, 50_000, num_tokens).tolist()
    sequence = Sequence(Request("digest", tuple(tokens)), index=0, seed=0, version="v1")
    started = clock()
    pool.index.digest(sequence, num_tokens // PAGE_SIZE - 1)
    return (clock() - started) / num_tokens


def percentiles(values: Iterable[float]) -> dict[str, Any]:
    """p50, p90, p99 and max."""
    found = np.fromiter(values, float)
    p50, p90, p99 = np.percentile(found, (50, 90, 99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": float(found.max())}
