"""From weights that are ready to a model that answers: what all versions of a server share.

No HTTP and no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.batch_window import BatchWindow
from jaxinfer.grammar_trial import GrammarTrial
from jaxinfer.guidance import Guidance
from jaxinfer.server.sampling import usable_defaults
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.tool_calls.formats import format_for

if TYPE_CHECKING:
    from jaxinfer.config import SchedulerConfig
    from jaxinfer.engine import Engine
    from jaxinfer.new_version import NewVersion
    from jaxinfer.observer import Observer
    from jaxinfer.stats import Verdict
    from jaxinfer.tokenizer import Tokenizer

TOKENIZER_THREADS = 2


class ModelServing:
    """Makes the engines and models of one server.

    Args:
        names: of the model, for every version; the first is shown.
        tool_call_parser: one of PARSERS.
        on_verdict: of every engine, see AsyncEngine.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        tool_call_parser: str,
        scheduler: SchedulerConfig,
        batch_wait_s: float,
        on_verdict: Callable[[Verdict], None],
    ):
        self._names = names
        self._tool_call_parser = tool_call_parser
        self._scheduler = scheduler
        self._batch_wait_s = batch_wait_s
        self._on_verdict = on_verdict

    def engine(self, core: Engine, observer: Observer) -> AsyncEngine:
        """Not started."""
        window = BatchWindow(
            self._batch_wait_s,
            max_tokens=self._scheduler.max_num_batched_tokens,
            max_seqs=self._scheduler.max_num_seqs,
        )
        return AsyncEngine(core, observer=observer, on_verdict=self._on_verdict, window=window)

    def version(self, new: NewVersion, engine: AsyncEngine) -> ServedModel:
        """On any thread. Raises: ValueError for one without a tokenizer."""
        tokenizer = new.model_version.tokenizer
        if tokenizer is None:
            raise ValueError(f"version {new.name} has no tokenizer, so it cannot be served")
        return self.model(
            engine,
            tokenizer,
            version=new.name,
            root=new.root,
            max_model_len=new.max_model_len,
            vocab_size=new.vocab_size,
            generation_config=new.generation_config,
            weights_bytes=new.weights_bytes,
        )

    def model(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        *,
        version: str,
        root: str,
        max_model_len: int,
        vocab_size: int,
        generation_config: Mapping[str, Any],
        weights_bytes: int,
    ) -> ServedModel:
        """See ServedModel."""
        template = tokenizer.chat_template
        trial = GrammarTrial(tokenizer, vocab_size)
        return ServedModel(
            engine=engine,
            tokenizer=tokenizer,
            names=self._names,
            root=root,
            max_model_len=max_model_len,
            version=version,
            defaults=usable_defaults(generation_config),
            pool=ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer"),
            tool_format=format_for(self._tool_call_parser, template.source if template else ""),
            guidance=Guidance(tokenizer, vocab_size, trial=trial),
            weights_bytes=weights_bytes,
        )
