"""A model that is ready, and how requests reach it.

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.errors import ModelNotFound

if TYPE_CHECKING:
    from jaxinfer.constraint import Constraint
    from jaxinfer.guidance import Guidance
    from jaxinfer.guided import Guided
    from jaxinfer.server.tool_calls.formats import ToolFormat
    from jaxinfer.tokenizer import Tokenizer

Result = TypeVar("Result")

QUICK_BODY_BYTES = 64 * 2**10  # parsed in less than 2 ms


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
    weights_bytes: int = 0  # on the device
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
        """Ends its threads. Not while another model has the same."""
        self.grammar_pool.shutdown(wait=False, cancel_futures=True)
        self.pool.shutdown(wait=False, cancel_futures=True)
