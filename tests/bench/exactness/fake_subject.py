"""A model under test without JAX, and runners that err on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bench.exactness.circumstance import Lab
from bench.exactness.probes import random_probes
from bench.exactness.subject import Subject
from bench.exactness.trace import Trace
from jaxinfer.build import Built
from jaxinfer.engine import Engine, Runner
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.request import Request
from tests.fakes import VOCAB_SIZE, FakeRunner, FakeTokenizer

PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN = 16, 160, 1024
LENGTHS = (2, 17, 31, 70, 40, 100)
PROBES = random_probes(LENGTHS, VOCAB_SIZE - 1, seed=1)


class FakeBuilt:
    """What `Subject` takes of a Built, on a FakeRunner."""

    def __init__(self) -> None:
        self.runner = FakeRunner(NUM_PAGES, PAGE_SIZE, versions={"v1": 0})
        self.buckets = Buckets.for_limits(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            page_size=PAGE_SIZE,
        )
        self.plan = SimpleNamespace(page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        self.max_model_len = MAX_MODEL_LEN
        self.engine = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.tokenizer = FakeTokenizer()
        self.version = "v1"
        self.summary = {"programs": "9 loaded, 0 compiled"}

    def another_engine(self, *args: Any, **kwargs: Any) -> Engine:
        return Built.another_engine(cast(Built, self), *args, **kwargs)


def fake_lab(around: Callable[[Runner], Runner] = lambda runner: runner) -> Lab:
    """A restart is another runner, with empty pages."""

    def restart(requests: Sequence[Request]) -> tuple[list[Trace], str]:
        built = cast(Built, FakeBuilt())
        session = Subject(built, around=around).session()
        ids = [session.submit(request) for request in requests]
        session.drain()
        return [session.trace(i) for i in ids], built.summary["programs"]

    def add_weights(built: Built, version: str) -> None:
        cast(FakeBuilt, built).runner.versions[version] = 1

    built = cast(Built, FakeBuilt())
    subject = Subject(built, restart=restart, around=around, add_weights=add_weights)
    return Lab(subject, PROBES)


Fault = Callable[[Batch, int], bool]
"""(a step, one of its sampled rows) -> whether its logprob is wrong."""


class Erring:
    """Moves a logprob by a few units in the last place where the fault says so."""

    def __init__(self, runner: Runner, fault: Fault):
        self._runner, self._fault = runner, fault
        self._num_steps = 0

    def dispatch(self, batch: Batch) -> Any:
        self._num_steps += 1
        rows = [row for row in range(batch.num_sampled) if self._fault(batch, row)]
        return self._num_steps, rows, self._runner.dispatch(batch)

    def collect(self, pending: Any) -> StepResult:
        step, rows, inner = pending
        result = self._runner.collect(inner)
        bits = result.logprobs.view(np.int32).copy()
        bits[rows] += 1 + step % 7  # never the same error for long
        return replace(result, logprobs=bits.view(np.float32))

    def rebuild(self) -> None:
        self._runner.rebuild()

    def drop_version(self, version: str) -> None:
        self._runner.drop_version(version)


class StalePage:
    """Reads another page in place of a sequence's first one wherever it goes on behind it."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.collect, self.rebuild = runner.collect, runner.rebuild
        self.drop_version = runner.drop_version

    def dispatch(self, batch: Batch) -> Any:
        table = batch.page_table.copy()
        for row in range(batch.num_seqs):
            positions = batch.positions[: batch.num_tokens][batch.rows[: batch.num_tokens] == row]
            if positions[0] >= PAGE_SIZE:
                table[row, 0] = (table[row, 0] + 11) % NUM_PAGES
        return self._runner.dispatch(replace(batch, page_table=table))


def num_new(batch: Batch, row: int) -> int:
    """Tokens that the step computes of a sampled row's sequence."""
    own = batch.rows[batch.sample_at[row]]
    return int((batch.rows[: batch.num_tokens] == own).sum())


def start(batch: Batch, row: int) -> int:
    """Position of the first of them."""
    return int(batch.positions[batch.sample_at[row]]) + 1 - num_new(batch, row)


def in_company(batch: Batch, row: int) -> bool:
    return batch.num_seqs > 1


def after_a_chunk(batch: Batch, row: int) -> bool:
    """The last chunk of several, or what is left behind cached tokens."""
    return num_new(batch, row) > 1 and start(batch, row) > 0


def riding(batch: Batch, row: int) -> bool:
    return batch.kind == "prefill" and num_new(batch, row) == 1


def out_of_order(batch: Batch, row: int) -> bool:
    """On other pages than the first ones of the pool."""
    own = batch.page_table[batch.rows[batch.sample_at[row]]]
    used = own[: -(-int(batch.sampling.positions[row]) // PAGE_SIZE)]
    return used.tolist() != list(range(len(used)))
