"""What the endpoints share: the phase of the server, and the model once it is there.

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import Truncate
from jaxinfer.errors import ModelNotFound, Unavailable
from jaxinfer.server.admission import Admission
from jaxinfer.server.circuit_breaker import CircuitBreaker
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.open_calls import OpenCalls
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.time_limits import TimeLimits

if TYPE_CHECKING:
    from jaxinfer.constraint import Constraint
    from jaxinfer.guidance import Guidance
    from jaxinfer.guided import Guided
    from jaxinfer.server.tool_calls.formats import ToolFormat
    from jaxinfer.tokenizer import Tokenizer

Phase = Literal["loading", "ready", "draining"]
Result = TypeVar("Result")

LOADING_RETRY_S = 5.0
QUICK_BODY_BYTES = 64 * 2**10  # parsed in less than 2 ms
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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and how requests reach it."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    names: tuple[str, ...]  # the first is shown
    root: str  # what it was loaded from
    max_model_len: int  # tokens
    version: str  # of the weights
    defaults: Mapping[str, Any]  # of sampling fields, from the model's generation_config
    pool: ThreadPoolExecutor  # tokenization, never on the event loop
    guidance: Guidance  # what compiles grammars
    tool_format: ToolFormat | None = None  # how the model writes calls; None: it is not known
    created: int = field(default_factory=lambda: int(time.time()))
    grammar_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def check_name(self, name: str | None) -> str:
        """The name to show in the answer. Raises: ModelNotFound."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ModelNotFound(
                f"the model {name[:80]!r} does not exist; this server has "
                f"{', '.join(map(repr, self.names))}",
                param="model",
            )
        return name

    async def for_body(self, body: bytes, work: Callable[[], Result]) -> Result:
        """Runs `work` on a body here if that is quick, else on a thread of the pool."""
        return work() if len(body) <= QUICK_BODY_BYTES else await self.off_loop(work)

    async def off_loop(self, work: Callable[[], Result]) -> Result:
        """Runs tokenizer work on a thread of the pool."""
        context = copy_context()  # so that a log line of the thread has the request's id
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, context.run, work)

    async def compile(self, guided: Guided, param: str) -> Constraint:
        """On a thread of its own, so that a hard grammar holds up grammars and nothing else.

        Raises: InvalidRequest naming `param`.
        """
        loop = asyncio.get_running_loop()
        work = partial(self.guidance.compile, guided, param=param)
        return await loop.run_in_executor(self.grammar_pool, work)

    def close(self) -> None:
        self.grammar_pool.shutdown(wait=False, cancel_futures=True)
        self.pool.shutdown(wait=False, cancel_futures=True)


class ServerState:
    """loading -> ready -> draining, and what is there in each.

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
        self._model: ServedModel | None = None
        self._unknown_fields: set[str] = set()

    def become_ready(self, model: ServedModel) -> None:
        self._model = model
        if self.phase == "loading":
            self.phase = "ready"

    def begin_drain(self, timeout_s: float) -> None:
        self.phase = "draining"
        self.drain_until_s = time.monotonic() + timeout_s

    @property
    def model(self) -> ServedModel | None:
        return self._model

    def served(self) -> ServedModel:
        """The model, if it takes requests. Raises: Unavailable with the reason."""
        if self.phase == "draining":
            left = (self.drain_until_s or 0.0) - time.monotonic()
            raise Unavailable("the server shuts down", retry_after_s=left, code="draining")
        if self._model is None:
            raise Unavailable(
                f"the model is loading: {self.progress}",
                retry_after_s=LOADING_RETRY_S,
                code="loading",
            )
        return self._model

    def time_limits(self, asked: PriorityClass | None) -> TimeLimits:
        """Those of the server and, where it is known, of the class."""
        limits = TimeLimits(self.limits.request_timeout_s, self.limits.queue_timeout_s)
        if asked is None:
            return limits
        return limits.within(TimeLimits(asked.timeout_s, asked.queue_timeout_s))

    @property
    def step_s(self) -> float:
        """Seconds that the step under way takes so far; 0.0 before there is a model."""
        return 0.0 if self._model is None else self._model.engine.seconds_in_turn

    def let_in(self) -> AbstractContextManager[None]:
        """Around a new request; entering raises Unavailable while steps fail or hang."""
        return self.breaker.let_in(self.step_s)

    def refusal(self) -> Unavailable | None:
        """Why steps that fail or hang keep everybody out; None: they do not."""
        self.breaker.look(self.step_s)
        return self.breaker.refusal()

    def ailment(self) -> str | None:
        """Why the process should be restarted; None: it is well."""
        if self._model is None:
            return None
        engine = self._model.engine
        if not engine.is_alive:
            return "the engine thread has ended"
        if self.step_s > self.limits.step_timeout_s:
            return f"no engine step has ended for {self.step_s:.0f} s"
        return None

    def new_unknown_fields(self, names: frozenset[str]) -> list[str]:
        """Those of `names` that were not seen before."""
        room = MAX_KNOWN_UNKNOWNS - len(self._unknown_fields)
        new = sorted(names - self._unknown_fields)[: max(room, 0)]
        self._unknown_fields.update(new)
        return new
