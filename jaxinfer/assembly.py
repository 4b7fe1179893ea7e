"""Programs, pages and parameters become a runner; with a scheduler, an engine.

What the first engine of a process and a second one have in common. Knows no files.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from random import Random

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.kv_cache import KVPages
from jaxinfer.runtime.program_set import ProgramSet
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.runtime.steps import Params
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.versions import ModelVersion


def make_runner(
    found: ProgramSet, decoder: Decoder, pages: KVPages, params: Params, version: str
) -> ModelRunner:
    """Over `pages`, which it owns from here on, with one version."""
    return ModelRunner(
        {version: params},
        pages,
        found.programs,
        layer_kinds=decoder.layer_kinds,
        num_seats=found.buckets.max_rows,
        make_pages=found.make_pages,
        vocab_size=decoder.config.vocab_size,
    )


def make_engine(
    config: EngineConfig,
    found: ProgramSet,
    decoder: Decoder,
    runner: ModelRunner,
    version: ModelVersion,
) -> Engine:
    """With limits and seeds of `config`, and a pool as planned."""
    plan, buckets = found.plan, found.buckets  # not the programs, which a runner lets go of

    def make_scheduler() -> Scheduler:
        pool = PagePool(plan.num_pages, plan.page_size, config.cache.enable_prefix_caching)
        return Scheduler(plan.scheduler_config(config.scheduler), pool, buckets)

    return Engine(
        runner=runner,
        make_scheduler=make_scheduler,
        tokenizer=version.tokenizer,
        version=version.name,
        vocab_size=decoder.config.vocab_size,
        eos_token_ids=version.eos_token_ids,
        random_seed=seed_source(config.seed),
    )


def seed_source(seed: int | None) -> Callable[[], int]:
    """64 random bits at each call: from the system, or reproducible from `seed`."""
    if seed is None:
        return lambda: secrets.randbits(64)
    random = Random(seed)
    return lambda: random.getrandbits(64)
