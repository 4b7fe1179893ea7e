"""Every program, ready before the first request: loaded from the cache or lowered and compiled.

Nothing here runs while serving; the runner calls finished executables, which cannot recompile.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from jax.stages import Compiled, Lowered

from jaxinfer.runtime.compile_counter import with_context
from jaxinfer.runtime.program_cache import Kept, ProgramCache
from jaxinfer.runtime.program_memory import ProgramMemory

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Program:
    """One shape of one step, not compiled yet."""

    name: str  # e.g. "decode rows=8 layer"
    lower: Callable[[], Lowered]
    compiler_options: Mapping[str, bool] = field(default_factory=dict[str, bool])

    def compile(self) -> Compiled:
        """The executable, from nothing."""
        return self.lower().compile(dict(self.compiler_options) or None)


@dataclass(frozen=True, slots=True)
class Programs:
    """All executables by name, and where they came from."""

    by_name: dict[str, Compiled]
    num_compiled: int
    num_loaded: int
    seconds: float
    memory: Mapping[str, ProgramMemory] = field(default_factory=dict[str, ProgramMemory])

    def __getitem__(self, name: str) -> Compiled:
        return self.by_name[name]

    def get(self, name: str) -> Compiled | None:
        return self.by_name.get(name)

    def without(self, name: str) -> Programs:
        """These less one, which counts as before."""
        return dataclasses.replace(
            self,
            by_name={n: program for n, program in self.by_name.items() if n != name},
            memory={n: memory for n, memory in self.memory.items() if n != name},
        )

    def merged(self, other: Programs) -> Programs:
        """These and the other's."""
        return Programs(
            by_name=self.by_name | other.by_name,
            num_compiled=self.num_compiled + other.num_compiled,
            num_loaded=self.num_loaded + other.num_loaded,
            seconds=self.seconds + other.seconds,
            memory={**self.memory, **other.memory},
        )


def make_ready(
    programs: Sequence[Program],
    cache: ProgramCache | None,
    *,
    on_ready: Callable[[str], None] = lambda name: None,
    num_threads: int | None = None,
) -> Programs:
    """Loads or compiles all programs, as many at once as there are cores.

    Args:
        cache: where executables are kept between starts; None: compile all.
        on_ready: called with a program's name when it is there, from several threads; what it
            raises ends the work, and is raised.
        num_threads: so many at once; None: as there are cores.
    """
    started = time.monotonic()
    compiled: list[str] = []

    def prepare(program: Program) -> Kept:
        kept = cache.load(program.name) if cache else None
        if kept is None:
            kept = _compiled(program, cache)
            compiled.append(program.name)
        on_ready(program.name)
        return kept

    ready = _at_once(prepare, programs, num_threads)
    if cache:
        cache.trim()
    by_name = {p.name: kept for p, kept in zip(programs, ready, strict=True)}
    return Programs(
        by_name={name: kept.executable for name, kept in by_name.items()},
        num_compiled=len(compiled),
        num_loaded=len(programs) - len(compiled),
        seconds=time.monotonic() - started,
        memory={name: kept.memory for name, kept in by_name.items()},
    )


def measure(
    programs: Sequence[Program],
    cache: ProgramCache | None,
    *,
    on_ready: Callable[[str], None] = lambda name: None,
    num_threads: int | None = None,
) -> dict[str, ProgramMemory]:
    """What programs need, by name: as the cache remembers, else compiled to ask the compiler.

    Args: as of `make_ready`.
    """

    def ask(program: Program) -> ProgramMemory:
        memory = cache.memory(program.name) if cache else None
        if memory is None:
            memory = _compiled(program, cache).memory
        on_ready(program.name)
        return memory

    asked = _at_once(ask, programs, num_threads)
    return {p.name: m for p, m in zip(programs, asked, strict=True)}


def _compiled(program: Program, cache: ProgramCache | None) -> Kept:
    executable = program.compile()
    if cache:
        return Kept(executable, cache.store(program.name, executable))
    return Kept(executable, ProgramMemory.of(executable))


def _at_once(
    work: Callable[[Program], Result], programs: Sequence[Program], num_threads: int | None
) -> list[Result]:
    """Results in order. The first error ends the rest, as far as it has not begun."""
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1, "compile") as pool:
        try:
            return list(pool.map(with_context(work), programs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
