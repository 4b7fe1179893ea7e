"""Random requests over every feature, and a run of them. A feature is one entry of FEATURES.

Every request fits, so whatever does not end is a fault of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinfer.build import Built
from jaxinfer.config import SamplingParams, SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.guidance import Guidance
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.scheduling.scheduler import Scheduler
from tests.fakes import FakeClock

RULES: tuple[dict[str, Any], ...] = (
    {"regex": "(the|a) [a-z ]*"},
    {"json_schema": {"type": "array", "items": {"enum": [1, "the", None]}}},
    {"choice": ["the", "the dog", "a cat"]},
)
Draw = Callable[[np.random.Generator, int], Any]  # (randomness, vocabulary size) -> a value

FEATURES: Mapping[str, Draw] = {  # fields of SamplingParams; each is on in some requests
    "top_k": lambda rng, vocab: int(rng.integers(1, vocab + 100)),
    "top_p": lambda rng, vocab: float(rng.uniform(0.05, 1)),
    "min_p": lambda rng, vocab: float(rng.uniform(0, 0.5)),
    "seed": lambda rng, vocab: int(rng.integers(-(2**63), 2**63 - 1)),
    "n": lambda rng, vocab: int(rng.integers(2, 5)),
    "stop": lambda rng, vocab: ("a", "the", "\n"),
    "stop_token_ids": lambda rng, vocab: tuple(rng.integers(0, vocab, 3).tolist()),
    "logprobs": lambda rng, vocab: int(rng.integers(0, 21)),
    "presence_penalty": lambda rng, vocab: float(rng.uniform(-2, 2)),
    "frequency_penalty": lambda rng, vocab: float(rng.uniform(-2, 2)),
    "repetition_penalty": lambda rng, vocab: float(rng.uniform(0.5, 2)),
    "logit_bias": lambda rng, vocab: dict.fromkeys(rng.integers(0, vocab, 300).tolist(), 3.0),
    "ignore_eos": lambda rng, vocab: True,
    "output_cap": lambda rng, vocab: int(rng.integers(1, 20)),
    "truncate": lambda rng, vocab: "sentence",
    "kept_special_ids": lambda rng, vocab: tuple(rng.integers(0, vocab, 2).tolist()),
    "skip_special_tokens": lambda rng, vocab: False,
    "include_stop_str_in_output": lambda rng, vocab: True,
    "guided": lambda rng, vocab: RULES[int(rng.integers(len(RULES)))],
}
SHARE = 0.25  # of the requests that have a feature
TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 2.0)
CROWD = 8  # rows of the smallest bucket
SHARE_OF_ABORTS, SHARE_OF_DEADLINES, SHARE_OF_PREFIXES = 0.08, 0.08, 0.4


@dataclass(frozen=True, slots=True)
class Limits:
    max_prompt: int  # tokens
    max_tokens: int
    page_size: int
    step_s: float  # that a step takes on the clock of the run, which is the same in every run
    max_open: int = 60  # requests at once


class RandomRequests:
    """Draws requests. They are short more often than long, and some prompts begin alike.

    Args:
        guidance: None: no answer follows a grammar.
    """

    def __init__(
        self, seed: int, vocab_size: int, limits: Limits, guidance: Guidance | None = None
    ):
        self._guidance = guidance
        self._rng = np.random.default_rng(seed)
        self._vocab_size, self._limits = vocab_size, limits
        self._heads = [self._ids(limits.max_prompt // 2) for _ in range(4)]
        self._number = 0

    def burst(self) -> int:
        """How many arrive before a step."""
        return int(self._rng.choice([0, 0, 0, 1, 1, 2, 3, 8, 40]))

    def crowd(self, num_kv_tokens: int) -> list[Request]:
        """Requests that run together when they come, and together outgrow the pool."""
        length = int(1.5 * num_kv_tokens / CROWD / 2)
        sampling = SamplingParams(max_tokens=length, ignore_eos=True)
        return [
            Request(f"crowd{i}", tuple(self._ids(length)), sampling, arrival_s=0.0)
            for i in range(CROWD)
        ]

    def wave(self, number: int, now: float) -> list[Request]:
        """Requests of a page each, that decode together and end one after the other."""
        return [
            Request(
                f"wave{i}",
                tuple(self._ids(2)),
                SamplingParams(max_tokens=13 - i % 4, ignore_eos=True),
                arrival_s=now,
            )
            for i in range(number)
        ]

    def draw(self, now: float) -> Request:
        rng = self._rng
        self._number += 1
        sampling = self._sampling()
        constraint = None
        if self._guidance is not None and sampling.grammar is not None:
            constraint = self._guidance.compile(sampling.grammar)
        return Request(
            f"r{self._number}",
            tuple(self._prompt()),
            sampling if constraint is not None else replace(sampling, guided=None),
            arrival_s=now,
            priority=int(rng.integers(-2, 3)),
            deadline_s=now + rng.exponential(0.2) if rng.random() < SHARE_OF_DEADLINES else None,
            cache_salt="other" if rng.random() < 0.1 else "",
            constraint=constraint,
        )

    def steps_to_abort(self) -> int | None:
        """After which a request's client goes away; None: it stays."""
        return int(self._rng.integers(0, 12)) if self._rng.random() < SHARE_OF_ABORTS else None

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        max_tokens = self._short(self._limits.max_tokens)
        chosen = {
            name: draw(rng, self._vocab_size)
            for name, draw in FEATURES.items()
            if rng.random() < SHARE
        }
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < SHARE else 0,
            temperature=float(rng.choice(TEMPERATURES)),
            **chosen,
        )

    def _prompt(self) -> list[int]:
        length = self._short(self._limits.max_prompt)
        if self._rng.random() > SHARE_OF_PREFIXES:
            return self._ids(length)
        head = self._heads[self._rng.integers(len(self._heads))]
        return [*head[: max(length - 1, 0)], *self._ids(1)]

    def _short(self, limit: int) -> int:
        """From 1 to `limit`, a seventh of it on average."""
        return 1 + int(limit * self._rng.random() ** 6)

    def _ids(self, length: int) -> list[int]:
        return self._rng.integers(0, self._vocab_size, length).tolist()


@dataclass(slots=True)
class Tally:
    """What happened in a run."""

    reasons: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    buckets: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    ended: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])

    def add(self, output: RequestOutput) -> None:
        if output.finish_reason is None:
            return
        self.ended[output.request_id, output.index] += 1
        self.reasons[output.finish_reason] += 1
        assert output.stats is not None
        self.num_cached_tokens += output.stats.num_cached_tokens
        self.num_preemptions += output.stats.num_preemptions


def run(
    engine: Engine,
    requests: RandomRequests,
    number: int,
    limits: Limits,
    clock: FakeClock,
    *,
    max_rows: int,
) -> Tally:
    """Submits a crowd, then the rest of `number` requests as they come, and last a wave; steps
    until all ended.
    """
    tally, leaving = Tally(), dict[str, int]()
    submitted = requests.crowd(engine.pool_stats().pages_total * limits.page_size)
    for request in submitted:
        engine.submit(request)
    num_steps = 0
    while len(submitted) <= number or engine.has_work():
        num_open = sum(request.sampling.n for request in submitted) - len(tally.ended)
        for _ in range(min(requests.burst(), number - len(submitted))):
            if num_open < limits.max_open:
                request = requests.draw(clock.now)
                engine.submit(request)
                submitted.append(request)
                steps = requests.steps_to_abort()
                if steps is not None:
                    leaving[request.request_id] = num_steps + steps
        for request_id in [key for key, at in leaving.items() if at <= num_steps]:
            del leaving[request_id]
            for output in engine.abort(request_id):
                tally.add(output)
        if len(submitted) == number and not engine.has_work():
            wave = requests.wave(max_rows, clock.now)
            submitted += wave
            for request in wave:
                engine.submit(request)
        step = engine.step()
        num_steps += 1
        clock.now += limits.step_s
        if step.stats is not None:
            tally.buckets.add((step.stats.kind, step.stats.num_padded_tokens))
        for output in step.outputs:
            tally.add(output)
    expected = {(r.request_id, i) for r in submitted for i in range(r.sampling.n)}
    assert tally.ended.keys() == expected
    assert set(tally.ended.values()) == {1}
    return tally


def small_engine(built: Built, num_pages: int, clock: FakeClock) -> Engine:
    """Over the same programs, but so few pages that sequences are preempted."""
    config = SchedulerConfig(
        max_num_seqs=built.buckets.max_rows,
        max_num_batched_tokens=built.buckets.max_tokens,
        max_model_len=num_pages * built.plan.page_size,
    )
    return Engine(
        runner=built.runner,
        make_scheduler=lambda: Scheduler(
            config, PagePool(num_pages, built.plan.page_size), built.buckets
        ),
        tokenizer=built.tokenizer,
        version=built.version,
        vocab_size=built.engine.vocab_size,
        eos_token_ids=built.tokenizer.eos_token_ids,
        random_seed=lambda: 1,
        clock=clock,
    )


def assert_nothing_compiled_and_nothing_kept(
    built: Built, number: int, limits: Limits, *, num_pages: int
) -> None:
    """The run of all features: every program was called, none was made."""
    clock = FakeClock()
    engine = small_engine(built, num_pages, clock)
    guidance = Guidance(built.tokenizer, engine.vocab_size)
    requests = RandomRequests(3, engine.vocab_size, limits, guidance)
    tally = run(engine, requests, number, limits, clock, max_rows=built.buckets.max_rows)
    assert built.compile_events()["serving"] == 0
    assert engine.pool_stats().pages_used == 0
    assert tally.reasons.keys() == set(FinishReason) - {FinishReason.ERROR}
    assert tally.num_preemptions > 0
    assert tally.num_cached_tokens > 0
    buckets = {
        *(("decode", rows) for rows in built.buckets.rows),
        *(("prefill", tokens) for tokens in built.buckets.tokens),
    }
    assert tally.buckets == buckets, f"not called: {buckets - tally.buckets}"
