"""The model under test: any number of engines over one set of programs, weights and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.exactness.other_weights import add_other_weights
from bench.exactness.session import Session
from bench.exactness.trace import Trace
from bench.exactness.watch import Watch
from jaxinfer.build import Built
from jaxinfer.config import SchedulerConfig
from jaxinfer.engine import Runner
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.versions import ModelVersion

Restart = Callable[[Sequence[Request]], tuple[list[Trace], str]]
"""Requests -> what each gave, and what the build said about its programs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What decides which circumstances there are."""

    buckets: Buckets
    page_size: int  # tokens
    num_pages: int
    max_model_len: int  # tokens of prompt and output


def _stand_still() -> float:
    """A clock on which no step is long: steps are pipelined on any machine."""
    return 0.0


def _unchanged(runner: Runner) -> Runner:
    return runner


class Subject:
    """A model whose engines are made as a circumstance asks for.

    Args:
        restart: runs requests on the same model after a restart (bench/exactness/restart.py).
        around: puts a runner around the model's own, e.g. one that errs.
        add_weights: gives a model's runner another version of the weights.
    """

    def __init__(
        self,
        built: Built,
        *,
        restart: Restart | None = None,
        around: Callable[[Runner], Runner] = _unchanged,
        add_weights: Callable[[Built, str], None] = add_other_weights,
    ):
        self.limits = Limits(
            built.buckets, built.plan.page_size, built.plan.num_pages, built.max_model_len
        )
        self.restart = restart
        self.vocab_size = built.engine.vocab_size
        self._built = built
        self._around = around
        self._add_weights = add_weights

    def session(
        self,
        *,
        max_tokens: int = 0,
        num_pages: int = 0,
        cache: bool = True,
        shuffle: np.random.Generator | None = None,
    ) -> Session:
        """A new engine with an empty prefix index, over pages that hold what was left there.

        Args:
            max_tokens, num_pages: of a step and of the pool; 0: what the programs were made for.
            cache: whether there is a prefix index at all.
            shuffle: puts the free pages into another order.
        """
        limits = self.limits

        def make_pool() -> PagePool:
            pool = PagePool(num_pages or limits.num_pages, limits.page_size, cache)
            if shuffle is not None:
                pool.release(shuffle.permutation(pool.allocate(pool.num_pages)).tolist())
            return pool

        config = SchedulerConfig(
            max_num_seqs=limits.buckets.max_rows,
            max_num_batched_tokens=max_tokens or limits.buckets.max_tokens,
            max_model_len=limits.max_model_len,
        )
        watch = Watch(self._around(self._built.runner), limits.page_size)
        engine = self._built.another_engine(config, make_pool, runner=watch, clock=_stand_still)
        return Session(engine, watch)

    def add_version(self, session: Session, version: str) -> None:
        """Other weights, under this name; the session has to drop them."""
        self._add_weights(self._built, version)
        tokenizer = self._built.tokenizer
        session.add_version(ModelVersion(version, tokenizer, tokenizer.eos_token_ids))
