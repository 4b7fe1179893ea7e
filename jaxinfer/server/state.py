"""What the endpoints share: the phase of the server, and the model once it is there.

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.errors import ModelNotFound, Unavailable
from jaxinfer.server.admission import Admission
from jaxinfer.server.metrics import Metrics

if TYPE_CHECKING:
    from jaxinfer.constraint import Constraint
    from jaxinfer.guidance import Guidance
    from jaxinfer.guided import Guided
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
    max_body_bytes: int = 16 * 2**20
    body_s: float = 60.0  # for a body to arrive; then 408
    request_timeout_s: float | None = None  # from arrival to the last token; None: none
    ping_s: float = 15.0  # of silence, then a comment on the stream
    stall_s: float = 60.0  # a reader that takes nothing for so long is cut off
    hang_s: float = 120.0  # an engine turn that takes longer counts as dead


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
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

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
    """

    def __init__(self, limits: Limits, metrics: Metrics, *, api_keys: Sequence[str] = ()):
        self.limits = limits
        self.metrics = metrics
        self.api_keys = tuple(api_keys)
        self.admission = Admission(limits.max_queued_requests)
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

    def ailment(self) -> str | None:
        """Why the process should be restarted; None: it is well."""
        if self._model is None:
            return None
        engine = self._model.engine
        if not engine.is_alive:
            return "the engine thread has ended"
        if engine.seconds_since_turn > self.limits.hang_s:
            return f"no engine step has ended for {engine.seconds_since_turn:.0f} s"
        return None

    def new_unknown_fields(self, names: frozenset[str]) -> list[str]:
        """Those of `names` that were not seen before."""
        room = MAX_KNOWN_UNKNOWNS - len(self._unknown_fields)
        new = sorted(names - self._unknown_fields)[: max(room, 0)]
        self._unknown_fields.update(new)
        return new
