"""The composition root: a configuration becomes an engine.

The one file where the host half and the device half meet.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import gt
from pathlib import Path
from typing import Any

import jax

from jaxinfer.assembly import make_engine, make_runner, seed_source
from jaxinfer.config import EngineConfig, SchedulerConfig, cache_folder
from jaxinfer.engine import Engine, Runner
from jaxinfer.errors import ConfigError
from jaxinfer.found_model import FoundModel, find_model
from jaxinfer.runtime.aot import Programs
from jaxinfer.runtime.compile_counter import CompileCounter
from jaxinfer.runtime.kv_cache import KVPages
from jaxinfer.runtime.memory_budget import read_budget
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.runtime.program_set import ProgramSet, prepare
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.runtime.scorer import Scorer
from jaxinfer.runtime.steps import Params
from jaxinfer.runtime.together import Together
from jaxinfer.runtime.weights import load_weights
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.version_loading import VersionLoading
from pallas_kernels.backend import Backend, resolve_backend

_log = logging.getLogger(__name__)

PROGRAMS = "programs"  # in the cache folder


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that a server or a script needs, ready to run."""

    engine: Engine
    runner: ModelRunner
    buckets: Buckets
    scorer: Scorer
    tokenizer: Tokenizer
    model_name: str
    max_model_len: int
    version: str  # content hash of the weights
    generation_config: dict[str, Any]  # the checkpoint's defaults, Hugging Face keys
    plan: MemoryPlan
    compile_counter: CompileCounter
    version_source: VersionLoading
    summary: dict[str, Any]  # what was planned and how long it took, for people

    def compile_events(self) -> dict[str, int]:
        """XLA compilations so far: of `startup`, for another `version`, and of `serving`: 0."""
        return self.compile_counter.by_phase()

    def close(self) -> None:
        """Gives back what is on the device. The engine must not step any more."""
        self.engine.close()
        self.runner.close()

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The plan's parts, of all versions that are there now: weights, programs, kv_pool; on a
        CPU also the process itself, as it was before there were any.
        """
        return self.plan.by_kind() | self.version_source.bytes_by_kind()

    def another_engine(
        self,
        scheduler: SchedulerConfig,
        make_pool: Callable[[], PagePool],
        *,
        runner: Runner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Engine:
        """An engine with other limits over these programs, weights and pages.

        All engines of a model write to the same pages: one at a time may have work.

        Args:
            scheduler: within the buckets, with max_model_len resolved.
            make_pool: a pool of as many pages as the plan's or fewer, of its page size.
            runner: that stands before this one's, e.g. to watch it.
            clock: seconds; one that stands still keeps steps pipelined, however long they take.
        Raises: ConfigError if the programs were not made for it.
        """

        def make_scheduler() -> Scheduler:
            pool = make_pool()
            limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, pool.num_pages
            most = self.buckets.max_rows, self.buckets.max_tokens, self.plan.num_pages
            if pool.page_size != self.plan.page_size or any(map(gt, limits, most)):
                raise ConfigError(
                    f"the programs are for at most {most} sequences, tokens of a step and pages of "
                    f"{self.plan.page_size} tokens; got {limits}, pages of {pool.page_size}"
                )
            return Scheduler(scheduler, pool, self.buckets)

        return Engine(
            runner=runner or self.runner,
            make_scheduler=make_scheduler,
            tokenizer=self.tokenizer,
            version=self.version,
            vocab_size=self.engine.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            random_seed=seed_source(None),
            clock=clock,
        )


def build(config: EngineConfig, on_progress: Callable[[str], None] = lambda phase: None) -> Built:
    """Loads the model and makes every program ready.

    Args:
        on_progress: told each phase as it begins.
    Raises: CheckpointError for files that do not fit, ConfigError for settings that cannot work.
    """
    counter = CompileCounter()
    phases = _Phases(on_progress)
    cache_dir = cache_folder(config)
    with phases("find model"):
        model = _find(config, cache_dir)
    checkpoint, decoder = model.checkpoint, model.decoder
    try:
        budget = read_budget(config.memory_utilization)  # before there are weights
        on_progress("load weights and compile")
        both = Together()

        def ready_pool() -> tuple[ProgramSet, KVPages]:
            with phases.timed("compile"):
                programs = cache_dir / PROGRAMS
                found = prepare(config, decoder, budget, programs, on_ready=both.check)
            with phases.timed("allocate KV pool"):
                return found, jax.block_until_ready(found.make_pages())

        def loaded() -> Params:
            with phases.timed("load weights"):
                params = load_weights(
                    checkpoint, decoder, on_tensor=both.check, show_progress=config.show_progress
                )
                return jax.block_until_ready(params)

        (found, pages), params = both.run(ready_pool, loaded)
    finally:
        checkpoint.close()
    return _assemble(config, model, found, pages, params, phases, counter)


def _assemble(
    config: EngineConfig,
    model: FoundModel,
    found: ProgramSet,
    pages: KVPages,
    params: Params,
    phases: _Phases,
    counter: CompileCounter,
) -> Built:
    plan, buckets = found.plan, found.buckets
    runner = make_runner(found, model.decoder, pages, params, model.version)
    engine = make_engine(config, found, model.decoder, runner, model.model_version)
    scorer = Scorer(
        runner,
        lambda: engine.pool,
        buckets,
        version=model.version,
        max_model_len=plan.max_model_len,
        vocab_size=model.decoder.config.vocab_size,
        programs=found.score,
    )
    counter.mark_ready()
    return Built(
        engine=engine,
        runner=runner,
        buckets=buckets,
        scorer=scorer,
        tokenizer=model.tokenizer,
        model_name=config.source.model,
        max_model_len=plan.max_model_len,
        version=model.version,
        generation_config=model.checkpoint.generation_config,
        plan=plan,
        compile_counter=counter,
        version_source=VersionLoading(
            config, model, runner, plan, cache_dir=cache_folder(config), programs=PROGRAMS
        ),
        summary={"weights": model.choice.line(), **_summary(plan, found.programs, phases.seconds)},
    )


def compile_ahead(
    config: EngineConfig, on_progress: Callable[[str], None] = lambda phase: None
) -> dict[str, Any]:
    """Fills the cache with every program that `build` of the same configuration loads.

    Reads no weights and allocates no KV pool, so it may run where there is no room for them.

    Returns: what was done, for people.
    Raises: as `build`.
    """
    phases = _Phases(on_progress)
    cache_dir = cache_folder(config)
    with phases("find model"):
        model = _find(config, cache_dir)
    model.checkpoint.close()
    budget = read_budget(config.memory_utilization).elsewhere()
    with phases("compile"):
        found = prepare(config, model.decoder, budget, cache_dir / PROGRAMS)
    cache = found.cache
    missing = [name for name in found.programs.by_name if cache.memory(name) is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(found.programs.by_name)} programs could not be kept in "
            f"{cache.folder}; give a folder that can be written, with room (--cache-dir)"
        )
    return {
        "weights": model.choice.line(),
        "programs": _origin(found.programs),
        "folder": f"{cache.folder} ({cache.num_bytes() / (1 << 20):,.1f} MiB)",
        "seconds": phases.seconds,
    }


class _Phases:
    """Announces the phases of a build and times them; some pass side by side."""

    def __init__(self, on_progress: Callable[[str], None]):
        self._on_progress = on_progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        self._on_progress(name)
        with self.timed(name):
            yield

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


def _find(config: EngineConfig, cache_dir: Path) -> FoundModel:
    return find_model(
        config.source,
        backend_of(config),
        cache_dir,
        max_model_len=config.scheduler.max_model_len,
        show_progress=config.show_progress,
    )


def backend_of(config: EngineConfig) -> Backend:
    """The kernels' form on this process's device. Raises: ConfigError."""
    device = jax.devices()[0]
    try:
        found = resolve_backend(
            config.kernel_backend,
            platform=device.platform,
            compute_capability=getattr(device, "compute_capability", None),
            is_exact=config.batch_invariant,
        )
    except ValueError as error:
        raise ConfigError(f"{error} (--kernel-backend)") from error
    if found.form == "reference" and found.is_exact and device.platform != "cpu":
        _log.warning("without kernels, the bits of an answer may depend on its company on a GPU")
    return found


def _origin(programs: Programs) -> str:
    return f"{programs.num_loaded} loaded, {programs.num_compiled} compiled"


def _summary(plan: MemoryPlan, programs: Programs, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores",
        "memory": plan.line(),
        "programs": _origin(programs),
        "num_kv_tokens": plan.num_tokens,
        "max_concurrency": plan.num_tokens / plan.max_model_len,
        "max_model_len": plan.max_model_len,
        "seconds": seconds,
    }
