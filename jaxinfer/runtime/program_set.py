"""The programs of a model under a configuration, all ready, and the memory plan that they fit in.

The size of the KV pool is part of every program's shapes. On a GPU it follows from what is left
beside the programs: so the largest are first compiled over a small pool and asked, which is all the
same (their scratch does not depend on the number of pages; tests/runtime/test_program_set.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from tqdm import tqdm

from jaxinfer.config import EngineConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.aot import Programs, make_ready, measure
from jaxinfer.runtime.kv_cache import KVPages, make_pages, pages_dtype, pages_program
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import MemoryPlan, is_planned, longest_context, plan_memory
from jaxinfer.runtime.program_cache import ProgramCache
from jaxinfer.runtime.program_key import program_key
from jaxinfer.runtime.program_list import ProgramList
from jaxinfer.runtime.program_memory import programs_bytes
from jaxinfer.runtime.second_plan import plan_beside
from jaxinfer.runtime.steps import Steps
from jaxinfer.scheduling.buckets import Buckets

PROBE_PAGES = 8
ROOM_FOR_PROGRAMS = 8  # where less than an eighth of the pool is left, they are probed first
PROBE_MARGIN = 8  # an eighth more than the largest programs tell, for the others' code


@dataclass(frozen=True, slots=True)
class ProgramSet:
    """Everything of a model but its weights and pages."""

    plan: MemoryPlan
    buckets: Buckets
    programs: Programs  # of serving
    make_pages: Callable[[], KVPages]  # the KV pool
    score: Callable[[int], Programs]  # makes the programs of scoring ready, for a token bucket
    cache: ProgramCache


def prepare(
    config: EngineConfig,
    decoder: Decoder,
    budget: MemoryBudget,
    cache_root: Path,
    *,
    on_ready: Callable[[str], None] = lambda name: None,
) -> ProgramSet:
    """Plans, and loads or compiles all programs.

    Args:
        cache_root: where compiled programs are kept.
        on_ready: told each program's name, from several threads; what it raises ends the work.
    Raises: ConfigError for settings that cannot work, or a budget that is too small.
    """
    maker = _Maker(config, decoder, cache_root, on_ready)
    if not is_planned(config, budget):
        found = maker.make(plan_memory(config, decoder, budget, 0))
        found.plan.check()
        return found
    needed = maker.probe(longest_context(config, decoder))
    while True:
        found = maker.make(plan_memory(config, decoder, budget, needed))
        if found.plan.programs_bytes <= needed:
            return found
        needed = found.plan.programs_bytes  # a smaller bucket's program needs more than a larger's


def prepare_beside(
    config: EngineConfig,
    decoder: Decoder,
    budget: MemoryBudget,
    cache_root: Path,
    *,
    least_model_len: int,
    on_ready: Callable[[str], None] = lambda name: None,
) -> ProgramSet:
    """As `prepare`, in a process where another model runs: one program at a time, and over as large
    a pool as is left if the one that was asked for is larger (`plan_beside`).

    Args:
        least_model_len: tokens; a pool must hold one such sequence.
    Raises: ConfigError that says how much memory is missing.
    """
    planned = partial(plan_beside, config, decoder, budget, least_model_len=least_model_len)
    maker = _Maker(config, decoder, cache_root, on_ready, num_threads=1)
    plan = planned(0)
    total = budget.total_bytes
    if total is not None and plan.total_bytes + plan.pool_bytes // ROOM_FOR_PROGRAMS > total:
        plan = planned(maker.probe(plan.max_model_len))
    while True:
        found = maker.make(plan)
        if found.plan.fits:
            return found
        needed = found.plan.programs_bytes  # over a smaller pool they may need some bytes more
        plan = planned(needed + needed // PROBE_MARGIN)


class _Maker:
    """Makes the programs of a plan."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        cache_root: Path,
        on_ready: Callable[[str], None],
        num_threads: int | None = None,
    ):
        self._config, self._decoder, self._cache_root = config, decoder, cache_root
        self._on_ready, self._num_threads = on_ready, num_threads
        self._is_fused = _is_fused(config.step_programs)
        self._pages_dtype = pages_dtype(config.cache.kv_cache_dtype, decoder.dtype)

    def make(self, plan: MemoryPlan) -> ProgramSet:
        """All programs, and the plan with what they need; it may be over the budget."""
        buckets = self._buckets(plan.max_model_len)
        listed = self._listed(buckets, plan.num_pages)
        cache = self._cache(buckets, plan.num_pages)
        shape = {"num_pages": plan.num_pages, "page_size": plan.page_size}
        model, dtype = self._decoder.config, self._pages_dtype
        pages = pages_program(model, dtype=dtype, **shape)
        wanted = [*listed.serving(), pages]
        with self._bar("compiling", len(wanted)) as on_ready:
            ready = make_ready(wanted, cache, on_ready=on_ready, num_threads=self._num_threads)
        programs = ready.without(pages.name)
        needed = programs_bytes(programs.memory, listed.batch_bytes())
        return ProgramSet(
            plan=dataclasses.replace(plan, programs_bytes=needed),
            buckets=buckets,
            programs=programs,
            make_pages=partial(make_pages, model, dtype=dtype, program=ready[pages.name], **shape),
            score=lambda tokens: make_ready(listed.score(tokens), cache),
            cache=cache,
        )

    def probe(self, max_model_len: int) -> int:
        """Bytes that the programs will take: the largest of each kind, measured over a few pages,
        stand for all of theirs.
        """
        buckets = self._buckets(max_model_len)
        largest = dataclasses.replace(buckets, rows=buckets.rows[-1:], tokens=buckets.tokens[-1:])
        probes = self._listed(largest, PROBE_PAGES).serving()
        with self._bar("measuring", len(probes)) as on_ready:
            cache = self._cache(largest, PROBE_PAGES)
            found = measure(probes, cache, on_ready=on_ready, num_threads=self._num_threads)
        by_kind = {_kind(name): memory for name, memory in found.items()}
        listed = self._listed(buckets, PROBE_PAGES)
        names = [program.name for program in listed.serving()]
        needed = programs_bytes(
            {name: by_kind[_kind(name)] for name in names}, listed.batch_bytes()
        )
        return needed + needed // PROBE_MARGIN

    def _buckets(self, max_model_len: int) -> Buckets:
        scheduler = self._config.scheduler
        return Buckets.for_limits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            page_size=self._config.cache.page_size,
        )

    def _listed(self, buckets: Buckets, num_pages: int) -> ProgramList:
        return ProgramList(
            self._decoder,
            Steps(self._decoder, max_rows=buckets.max_rows),
            buckets,
            num_pages=num_pages,
            page_size=self._config.cache.page_size,
            pages_dtype=self._pages_dtype,
            is_fused=self._is_fused,
        )

    def _cache(self, buckets: Buckets, num_pages: int) -> ProgramCache:
        decoder, page_size = self._decoder, self._config.cache.page_size
        facts = (decoder.config, decoder.arithmetic, num_pages, page_size, buckets)
        key = program_key((*facts, self._pages_dtype, self._is_fused))
        return ProgramCache(self._cache_root, key)

    @contextmanager
    def _bar(self, what: str, total: int) -> Generator[Callable[[str], None]]:
        is_off = None if self._config.show_progress else True
        with tqdm(total=total, desc=what, disable=is_off) as bar:

            def on_ready(name: str) -> None:
                self._on_ready(name)
                bar.set_description_str(f"{what} {name}")
                bar.update()

            yield on_ready


def _kind(name: str) -> str:
    """A program's name without its bucket."""
    return re.sub(r"=\d+", "", name)


def _is_fused(step_programs: str) -> bool:
    """`auto`: one launch per step on a GPU; on a CPU, programs that compile and load quickly."""
    if step_programs == "auto":
        return jax.default_backend() == "gpu"
    return step_programs == "fused"
