"""What the endpoints share: the phase of the server, and the model once it is there.

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from jaxinfer.config import Truncate
from jaxinfer.errors import Unavailable
from jaxinfer.server.admission import Admission
from jaxinfer.server.circuit_breaker import CircuitBreaker
from jaxinfer.server.door import Door
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.open_calls import OpenCalls
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.served_versions import ServedVersions
from jaxinfer.server.time_limits import TimeLimits
from jaxinfer.stats import PoolStats, Verdict

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.canary.facts import RequestFacts
    from jaxinfer.server.answered import Answered
    from jaxinfer.server.rollouts import Rollouts
    from jaxinfer.server.served_model import ServedModel

Phase = Literal["loading", "ready", "draining"]
Fact = TypeVar("Fact")

log = logging.getLogger(__name__)

LOADING_RETRY_S = 5.0
MAX_KNOWN_UNKNOWNS = 256  # names of unknown fields that are remembered, so as to log each once


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server bounds."""

    max_queued_requests: int = 256  # queued and running
    max_queued_tokens: int | None = None  # of their prompts, and still to produce; None: no bound
    max_body_bytes: int = 16 * 2**20
    body_s: float = 60.0  # for a body to arrive; then 408
    max_connections: int = 512  # open ones; the requests of more get 503
    max_target_bytes: int = 8 * 2**10  # path and query; then 414
    max_header_bytes: int = 32 * 2**10  # all names and values; then 431
    max_headers: int = 100  # then 431
    header_s: float = 10.0  # for the head of a request to arrive; then 408
    request_timeout_s: float | None = None  # from arrival to the last token; None: none
    queue_timeout_s: float | None = None  # from arrival to the first step; None: none
    ping_s: float = 15.0  # of silence, then a comment on the stream
    stall_s: float = 60.0  # a reader that takes nothing for so long is cut off
    max_output_tokens: int | None = None  # of every choice, whatever it asks for; None: no cap
    truncate: Truncate | None = None  # None: sentence for chat, token for completions
    step_timeout_s: float = 120.0  # a step that takes longer hangs
    breaker_threshold: int = 5  # failed steps in a row, then no new requests
    breaker_open_s: float = 10.0  # for so long, then one at a time


class ServerState:
    """loading -> ready -> draining, and what is there in each.

    `on_verdict`, `on_request` and `on_answered` are who listens to steps, to choices that have
    ended and to requests that were answered well; None: nobody. A listener must be quick; what it
    raises is logged and harms nobody.

    Args:
        limits: see Limits.
        metrics: told what is refused.
        api_keys: any of them opens every route but /health and /ready; none: all are open.
        classes: of requests; None: the default ones.
        num_seats: sequences that the engine runs together; None: not known.
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        *,
        api_keys: Sequence[str] = (),
        classes: PriorityClasses | None = None,
        num_seats: int | None = None,
    ):
        self.limits = limits
        self.metrics = metrics
        self.api_keys = tuple(api_keys)
        self.calls = OpenCalls()
        self.admission = Admission(
            limits.max_queued_requests,
            max_tokens=limits.max_queued_tokens,
            classes=classes,
            num_seats=num_seats,
        )
        metrics.watch_queue(self.admission)
        self.breaker = CircuitBreaker(
            threshold=limits.breaker_threshold,
            step_timeout_s=limits.step_timeout_s,
            open_s=limits.breaker_open_s,
            on_change=metrics.on_breaker,
        )
        self.phase: Phase = "loading"
        self.progress = "starting"
        self.drain_until_s: float | None = None  # monotonic
        self.versions = ServedVersions()
        metrics.watch_versions(self.versions)
        self.on_verdict: Callable[[Verdict], None] | None = None
        self.on_request: Callable[[RequestFacts], None] | None = None
        self.on_answered: Callable[[Answered], None] | None = None
        self.door = Door()
        self.rollouts: Rollouts | None = None  # None before the server is ready
        self._unknown_fields: set[str] = set()

    def become_ready(self, model: ServedModel) -> None:
        self.versions.serve(model)
        if self.phase == "loading":
            self.phase = "ready"

    def begin_drain(self, timeout_s: float) -> None:
        self.phase = "draining"
        self.drain_until_s = time.monotonic() + timeout_s

    @property
    def model(self) -> ServedModel | None:
        """The stable one."""
        return self.versions.stable

    def note_step(self, verdict: Verdict) -> None:
        """A step of any version was read, or has failed. Those of a canary open no breaker."""
        if self.versions.is_stable(verdict.version):
            self.breaker.note_step(verdict.is_good)
        if not verdict.is_good:
            self.metrics.on_failed_step(verdict.version)
        _tell(self.on_verdict, verdict)

    def note_request(self, facts: RequestFacts) -> None:
        """A choice has ended."""
        _tell(self.on_request, facts)

    def note_answered(self, answered: Answered) -> None:
        """A request was answered well."""
        _tell(self.on_answered, answered)

    def served(self) -> ServedModel:
        """The model, if it takes requests. Raises: Unavailable with the reason."""
        if self.phase == "draining":
            left = (self.drain_until_s or 0.0) - time.monotonic()
            raise Unavailable("the server shuts down", retry_after_s=left, code="draining")
        if self.model is None:
            raise Unavailable(
                f"the model is loading: {self.progress}",
                retry_after_s=LOADING_RETRY_S,
                code="loading",
            )
        return self.model

    @property
    def engines(self) -> tuple[AsyncEngine, ...]:
        """Of every model that is here, those that are taken away too."""
        return self.versions.engines

    @property
    def num_open(self) -> int:
        """Requests of all engines that have not ended."""
        return sum(engine.num_open for engine in self.engines)

    @property
    def pool_stats(self) -> PoolStats | None:
        """Of all engines together; None before there is one."""
        engines = self.engines
        return PoolStats.total(e.pool_stats for e in engines) if engines else None

    async def flush_caches(self) -> int:
        """As AsyncEngine.flush_cache, of the stable model's engine and of others that live."""
        stable = self.served().engine
        others = [e for e in self.engines if e is not stable and e.is_alive]
        return sum(await asyncio.gather(*(e.flush_cache() for e in (stable, *others))))

    async def drain_engines(self, timeout_s: float) -> bool:
        """As AsyncEngine.drain, of all at once."""
        return all(await asyncio.gather(*(e.drain(timeout_s) for e in self.engines)))

    async def close(self) -> None:
        """Ends every engine after its current step, and the models' threads."""
        await asyncio.gather(*(engine.close() for engine in self.engines))
        for model in self.versions.here:
            model.close()

    def time_limits(self, asked: PriorityClass | None) -> TimeLimits:
        """Those of the server and, where it is known, of the class."""
        limits = TimeLimits(self.limits.request_timeout_s, self.limits.queue_timeout_s)
        if asked is None:
            return limits
        return limits.within(TimeLimits(asked.timeout_s, asked.queue_timeout_s))

    @property
    def step_s(self) -> float:
        """Seconds that the stable model's step under way takes so far; 0.0 before there is one."""
        return 0.0 if self.model is None else self.model.engine.seconds_in_turn

    def let_in(self) -> AbstractContextManager[None]:
        """Around a new request; entering raises Unavailable while steps fail or hang."""
        return self.breaker.let_in(self.step_s)

    def refusal(self) -> Unavailable | None:
        """Why steps that fail or hang keep everybody out; None: they do not."""
        self.breaker.look(self.step_s)
        return self.breaker.refusal()

    def ailment(self) -> str | None:
        """Why the process should be restarted; None: it is well. Of other models than the stable
        one nothing counts: those can be taken away.
        """
        if self.door.fault is not None:
            return self.door.fault
        return None if self.model is None else self.ailment_of(self.model)

    def ailment_of(self, model: ServedModel) -> str | None:
        """Why this model will not answer any more; None: its engine is well."""
        engine = model.engine
        if not engine.is_alive:
            return "the engine thread has ended"
        if engine.seconds_in_turn > self.limits.step_timeout_s:
            return f"no engine step has ended for {engine.seconds_in_turn:.0f} s"
        return None

    def new_unknown_fields(self, names: frozenset[str]) -> list[str]:
        """Those of `names` that were not seen before."""
        room = MAX_KNOWN_UNKNOWNS - len(self._unknown_fields)
        new = sorted(names - self._unknown_fields)[: max(room, 0)]
        self._unknown_fields.update(new)
        return new


def _tell(listener: Callable[[Fact], None] | None, fact: Fact) -> None:
    if listener is None:
        return
    try:
        listener(fact)
    except Exception:
        log.exception("%s could not be noted", type(fact).__name__)
