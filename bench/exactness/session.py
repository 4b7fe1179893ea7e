"""One engine, all that came out of it, and what its runner was given.

Drives `Engine` through its public methods only; a circumstance decides when to submit, to step and
to abort.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from bench.exactness.trace import Trace
from bench.exactness.watch import Step, Watch
from jaxinfer.engine import Engine
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.scheduling.sequence import choice_seed
from jaxinfer.stats import PoolStats
from jaxinfer.versions import ModelVersion

FIRST_OWN_SEED = 1 << 40  # of requests that name none, so that their rows can be told apart
MAX_STEPS = 5000  # no circumstance takes so many


class Sighting(NamedTuple):
    """A token of a choice, and the step in which it was drawn."""

    place: int  # among the output tokens
    row: int
    num_new: int
    pages: tuple[int, ...]
    number: int  # of the step
    step: Step


class Session:
    """An engine from its first request to its last.

    Every request gets an id and, if it names none, a seed of its own: rows are recognized by it.
    """

    def __init__(self, engine: Engine, watch: Watch):
        self._engine = engine
        self._watch = watch
        self._ids = itertools.count()
        self._requests: dict[str, Request] = {}
        self._traces: dict[str, list[Trace]] = {}

    @property
    def steps(self) -> list[Step]:
        return self._watch.steps

    @property
    def pool(self) -> PoolStats:
        return self._engine.pool_stats()

    def submit(self, request: Request, **sampling: object) -> str:
        """Queues it under a new id with fields of its sampling changed. Returns: the id.

        A seed that is None, there or here, becomes one of its own.
        """
        number = next(self._ids)
        if sampling.get("seed", request.sampling.seed) is None:
            sampling["seed"] = FIRST_OWN_SEED + number
        params = replace(request.sampling, **sampling)  # type: ignore[arg-type]
        own = replace(request, request_id=f"r{number}", sampling=params)
        self._engine.submit(own)
        self._requests[own.request_id] = own
        self._traces[own.request_id] = [Trace() for _ in range(params.n)]
        return own.request_id

    @property
    def version(self) -> str:
        """The weights of requests that name none."""
        return self._engine.version

    @property
    def versions(self) -> tuple[str, ...]:
        return self._engine.versions

    def add_version(self, found: ModelVersion) -> None:
        """Takes requests of another version, whose weights the runner has."""
        self._engine.add_version(found)

    def serve_version(self, version: str) -> None:
        self._engine.serve_version(version)

    def drop_version(self, version: str) -> None:
        """Frees its weights when its last request has ended."""
        self._engine.drop_version(version)

    def step(self) -> None:
        for output in self._engine.step().outputs:
            assert output.error is None, output.error
            self._traces[output.request_id][output.index].add(output)

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        """Steps until it is reached, or nothing is left to do."""
        while not is_reached() and self._engine.has_work():
            assert len(self.steps) < MAX_STEPS, "the engine does not come to an end"
            self.step()

    def drain(self) -> None:
        """Steps to the end of all requests; no page may be left behind."""
        self.step_until(lambda: False)
        assert self.pool.pages_used == 0, f"{self.pool.pages_used} pages are still owned"

    def abort(self, request_id: str) -> None:
        for output in self._engine.abort(request_id):
            self._traces[output.request_id][output.index].add(output)

    def trace(self, request_id: str, index: int = 0) -> Trace:
        return self._traces[request_id][index]

    def num_out(self, request_id: str) -> int:
        """Tokens of its first choice so far."""
        return len(self.trace(request_id))

    def is_over(self, request_id: str) -> bool:
        return self.trace(request_id).finish_reason is not None

    def was_aborted(self, request_id: str) -> bool:
        return self.trace(request_id).finish_reason is FinishReason.ABORT

    def num_cached(self, request_id: str) -> int:
        """Prompt tokens that a request which has ended found in the prefix index."""
        stats = self.trace(request_id).stats
        return -1 if stats is None else stats.num_cached_tokens

    def num_preemptions(self, request_id: str) -> int:
        """Of a request that has ended."""
        stats = self.trace(request_id).stats
        return -1 if stats is None else stats.num_preemptions

    def sightings(self, request_id: str) -> Iterator[Sighting]:
        """Where the tokens of the request's first choice were drawn, in order of the steps.

        Of two requests with one seed it shows the tokens of both.
        """
        request = self._requests[request_id]
        assert request.sampling.seed is not None
        seed, num_out = choice_seed(request.sampling.seed, 0), self.num_out(request_id)
        for number, step in enumerate(self.steps):
            for sampled in step.sampled:
                place = sampled.position - len(request.token_ids)
                if sampled.seed == seed and place < num_out:
                    yield Sighting(place, sampled.row, sampled.num_new, sampled.pages, number, step)
