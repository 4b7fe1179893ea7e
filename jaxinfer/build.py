"""The composition root: a configuration becomes an engine.

The one file where the host half and the device half meet.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import gt
from pathlib import Path
from random import Random
from typing import Any

import jax
from tqdm import tqdm

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.resolve import resolve
from jaxinfer.chat_template import ChatTemplate
from jaxinfer.config import EngineConfig, ModelSource, SchedulerConfig
from jaxinfer.engine import Engine, Runner
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import Decoder, decoder_for
from jaxinfer.runtime.aot import Program, Programs, make_ready
from jaxinfer.runtime.kv_cache import make_pages
from jaxinfer.runtime.memory_plan import MemoryPlan, default_dtype, plan_memory
from jaxinfer.runtime.program_cache import ProgramCache, program_key
from jaxinfer.runtime.program_list import ProgramList
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.runtime.scorer import Scorer
from jaxinfer.runtime.steps import Params, Steps
from jaxinfer.runtime.weights import load_weights
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.tokenizer import Tokenizer
from pallas_kernels.backend import resolve_backend

DEFAULT_CACHE = Path(".cache") / "jaxinfer"  # in the user's home


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
    summary: dict[str, Any]  # what was planned and how long it took, for people

    def another_engine(
        self, scheduler: SchedulerConfig, pool: PagePool, *, runner: Runner | None = None
    ) -> Engine:
        """An engine with other limits over these programs, weights and pages.

        All engines of a model write to the same pages: one at a time may have work.

        Args:
            scheduler: within the buckets, with max_model_len resolved.
            pool: of as many pages as the plan's or fewer, of its page size.
            runner: that stands before this one's, e.g. to watch it.
        Raises: ConfigError if the programs were not made for it.
        """
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, pool.num_pages
        most = self.buckets.max_rows, self.buckets.max_tokens, self.plan.num_pages
        if pool.page_size != self.plan.page_size or any(map(gt, limits, most)):
            raise ConfigError(
                f"the programs are for at most {most} sequences, tokens of a step and pages of "
                f"{self.plan.page_size} tokens; got {limits}, pages of {pool.page_size}"
            )
        return Engine(
            runner=runner or self.runner,
            scheduler=Scheduler(scheduler, pool, self.buckets),
            tokenizer=self.tokenizer,
            version=self.version,
            vocab_size=self.engine.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            random_seed=_seed_source(None),
        )


def build(config: EngineConfig, on_progress: Callable[[str], None] = lambda phase: None) -> Built:
    """Loads the model and makes every program ready.

    Args:
        on_progress: told each phase as it begins.
    Raises: CheckpointError for files that do not fit, ConfigError for settings that cannot work.
    """
    phases = _Phases(on_progress)
    cache_dir = Path(config.cache_dir or Path.home() / DEFAULT_CACHE).expanduser()
    with phases("find model"):
        checkpoint = _open(config, cache_dir)
    try:
        template = _chat_template(config.source)
        dtype = default_dtype(config.source.dtype)
        with _faults_of(checkpoint.path):
            decoder = decoder_for(checkpoint.config, dtype=dtype)
            tokenizer = _tokenizer(checkpoint, template)
        plan = plan_memory(config, decoder)
        with phases("load weights"):
            params = load_weights(checkpoint, decoder, show_progress=config.show_progress)
            jax.block_until_ready(params)
    finally:
        checkpoint.close()
    return _assemble(config, checkpoint, tokenizer, decoder, plan, params, cache_dir, phases)


def _assemble(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    decoder: Decoder,
    plan: MemoryPlan,
    params: Params,
    cache_dir: Path,
    phases: _Phases,
) -> Built:
    buckets = Buckets.for_limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        page_size=plan.page_size,
    )
    backend = resolve_backend(config.kernel_backend)
    steps = Steps(decoder, max_rows=buckets.max_rows, backend=backend)
    is_fused = _is_fused(config.step_programs)
    program_list = ProgramList(
        decoder,
        steps,
        buckets,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        is_fused=is_fused,
    )
    key = program_key((decoder.config, decoder.dtype, plan, buckets, backend))
    cache = ProgramCache(cache_dir / "programs", key)
    with phases("compile"):
        programs = _make_ready(program_list.serving(), cache, config.show_progress)
    with phases("allocate KV pool"):
        pages = make_pages(
            decoder.config,
            num_pages=plan.num_pages,
            page_size=plan.page_size,
            dtype=decoder.dtype,
        )
    runner = ModelRunner({checkpoint.version: params}, pages, programs)
    pool = PagePool(plan.num_pages, plan.page_size, config.cache.enable_prefix_caching)
    engine = Engine(
        runner=runner,
        scheduler=Scheduler(plan.scheduler_config(config.scheduler), pool, buckets),
        tokenizer=tokenizer,
        version=checkpoint.version,
        vocab_size=decoder.config.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        random_seed=_seed_source(config.seed),
    )
    scorer = Scorer(
        runner,
        pool,
        buckets,
        version=checkpoint.version,
        max_model_len=plan.max_model_len,
        vocab_size=decoder.config.vocab_size,
        programs=lambda tokens: make_ready(program_list.score(tokens), cache),
    )
    return Built(
        engine=engine,
        runner=runner,
        buckets=buckets,
        scorer=scorer,
        tokenizer=tokenizer,
        model_name=config.source.model,
        max_model_len=plan.max_model_len,
        version=checkpoint.version,
        generation_config=checkpoint.generation_config,
        plan=plan,
        summary=_summary(plan, programs, phases.seconds),
    )


class _Phases:
    """Announces the phases of a build and times them."""

    def __init__(self, on_progress: Callable[[str], None]):
        self._on_progress = on_progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        self._on_progress(name)
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


def _open(config: EngineConfig, cache_dir: Path) -> Checkpoint:
    source = config.source
    path = resolve(
        source.model,
        revision=source.revision,
        download_dir=source.download_dir,
        cache_dir=cache_dir,
        show_progress=config.show_progress,
    )
    return open_checkpoint(path)


@contextmanager
def _faults_of(path: Path) -> Generator[None]:
    """What a checkpoint's content makes go wrong is the checkpoint's fault, with its name."""
    try:
        yield
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _chat_template(source: ModelSource) -> str | None:
    """The user's own, in place of the checkpoint's."""
    if source.chat_template is None:
        return None
    try:
        text = Path(source.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template must be a readable Jinja file: {error}") from error
    ChatTemplate(text, bos_token=None, eos_token=None)  # refuses one that does not compile
    return text


def _tokenizer(checkpoint: Checkpoint, template: str | None) -> Tokenizer:
    return Tokenizer(
        checkpoint.tokenizer,
        chat_template=template or checkpoint.chat_template,
        bos_token=checkpoint.bos_token,
        eos_token=checkpoint.eos_token,
        add_bos=checkpoint.add_bos,
        eos_token_ids=checkpoint.eos_token_ids,
    )


def _is_fused(step_programs: str) -> bool:
    """`auto`: one launch per step on a GPU; on a CPU, programs that compile and load quickly."""
    if step_programs == "auto":
        return jax.default_backend() == "gpu"
    return step_programs == "fused"


def _make_ready(programs: list[Program], cache: ProgramCache, show_progress: bool) -> Programs:
    with tqdm(
        total=len(programs), desc="compiling", disable=None if show_progress else True
    ) as bar:

        def on_ready(name: str) -> None:
            bar.set_description_str(f"compiling {name}")
            bar.update()

        return make_ready(programs, cache, on_ready=on_ready)


def _seed_source(seed: int | None) -> Callable[[], int]:
    """64 random bits at each call: from the system, or reproducible from `seed`."""
    if seed is None:
        return lambda: secrets.randbits(64)
    random = Random(seed)
    return lambda: random.getrandbits(64)


def _summary(plan: MemoryPlan, programs: Programs, seconds: dict[str, float]) -> dict[str, Any]:
    mib = 1 << 20
    return {
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores",
        "memory": f"weights {plan.weights_bytes / mib:,.0f} MiB + KV pool "
        f"{plan.pool_bytes / mib:,.0f} MiB ({plan.num_pages} pages of {plan.page_size} tokens)",
        "programs": f"{programs.num_loaded} loaded, {programs.num_compiled} compiled",
        "num_kv_tokens": plan.num_tokens,
        "max_concurrency": plan.num_tokens / plan.max_model_len,
        "max_model_len": plan.max_model_len,
        "seconds": seconds,
    }
