"""One request in many circumstances: its tokens and logprobs must be the same bits in all of them.

The harness builds engines over one runner: the same programs, weights and KV pool, under another
scheduler. Each circumstance proves that it happened (a hit, a preemption) before it compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.build import Built
from jaxinfer.config import SamplingParams, SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.stats import RequestStats


@dataclass(slots=True)
class Trace:
    """What one request gave: compared bit for bit."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stats: RequestStats | None = None

    @property
    def bits(self) -> tuple[tuple[int, ...], bytes]:
        return tuple(self.token_ids), np.asarray(self.logprobs, np.float32).tobytes()


class Bench:
    """Runs requests over the programs of `built` under any scheduler configuration."""

    def __init__(self, built: Built):
        self._built = built
        self._ids = itertools.count()
        self.vocab_size = built.engine.vocab_size
        self.page_size = built.plan.page_size

    def engine(
        self, *, chunk: int = 0, num_pages: int = 0, max_num_seqs: int = 0, cache: bool = True
    ) -> Engine:
        """A new engine with an empty prefix index; 0 takes the largest that the programs allow."""
        built = self._built
        pool = PagePool(num_pages or built.plan.num_pages, built.plan.page_size, cache)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs or built.buckets.max_rows,
            max_num_batched_tokens=chunk or built.buckets.max_tokens,
            max_model_len=built.max_model_len,
        )
        return Engine(
            runner=built.runner,
            scheduler=Scheduler(config, pool, built.buckets),
            tokenizer=built.tokenizer,
            version=built.version,
            vocab_size=built.engine.vocab_size,
            eos_token_ids=(),
            random_seed=lambda: 0,
        )

    def request(self, token_ids: Sequence[int], **sampling: object) -> Request:
        params = SamplingParams(**{"max_tokens": 12, "logprobs": 0} | sampling)  # type: ignore[arg-type]
        return Request(f"r{next(self._ids)}", tuple(token_ids), params)

    def again(self, request: Request) -> Request:
        """The same under a new id."""
        return Request(f"r{next(self._ids)}", request.token_ids, request.sampling)

    def run(self, engine: Engine, *arrivals: Iterable[Request]) -> dict[str, Trace]:
        """Submits one group of requests before each step until all have arrived and ended."""
        traces: dict[str, Trace] = {}
        groups = list(arrivals)
        while groups or engine.has_work():
            for request in groups.pop(0) if groups else ():
                engine.submit(request)
                traces[request.request_id] = Trace()
            for output in engine.step().outputs:
                assert output.error is None, output.error
                trace = traces[output.request_id]
                trace.token_ids += output.token_ids
                trace.logprobs += [entry.logprob for entry in output.logprobs]
                trace.stats = output.stats
        assert engine.pool_stats().pages_used == 0
        return traces

    def alone(self, request: Request, *, chunk: int = 0) -> Trace:
        """The reference: an empty cache and no company."""
        (trace,) = self.run(self.engine(cache=False, chunk=chunk), [self.again(request)]).values()
        return trace

    def random_ids(self, rng: np.random.Generator, length: int) -> list[int]:
        return rng.integers(0, self.vocab_size, length).tolist()

    def neighbours(self, rng: np.random.Generator, number: int, longest: int) -> list[Request]:
        """Requests of every kind: greedy, drawn, filtered; short and long."""
        kinds: list[dict[str, object]] = [
            {"temperature": 0.0},
            {"temperature": 0.9, "seed": 5},
            {"temperature": 1.3, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.8, "logprobs": 5},
            {"temperature": 1.0, "min_p": 0.05},
        ]
        return [
            self.request(
                self.random_ids(rng, int(rng.integers(1, longest))),
                max_tokens=int(rng.integers(1, 24)),
                **kinds[int(rng.integers(len(kinds)))],
            )
            for _ in range(number)
        ]
