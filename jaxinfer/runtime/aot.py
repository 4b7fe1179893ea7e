"""Every program, ready before the first request: loaded from the cache or lowered and compiled.

Nothing here runs while serving; the runner calls finished executables, which cannot recompile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
from jax.stages import Compiled, Lowered

from jaxinfer.runtime.program_cache import ProgramCache

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True, slots=True)
class Program:
    """One shape of one step, not compiled yet."""

    name: str  # e.g. "decode rows=8"
    lower: Callable[[], Lowered]


@dataclass(frozen=True, slots=True)
class Programs:
    """All executables by name, and where they came from."""

    by_name: dict[str, Compiled]
    num_compiled: int
    num_loaded: int
    seconds: float

    def __getitem__(self, name: str) -> Compiled:
        return self.by_name[name]

    def get(self, name: str) -> Compiled | None:
        return self.by_name.get(name)

    def merged(self, other: Programs) -> Programs:
        """These and the other's."""
        return Programs(
            by_name=self.by_name | other.by_name,
            num_compiled=self.num_compiled + other.num_compiled,
            num_loaded=self.num_loaded + other.num_loaded,
            seconds=self.seconds + other.seconds,
        )


def make_ready(
    programs: Sequence[Program],
    cache: ProgramCache | None,
    *,
    on_ready: Callable[[str], None] = lambda name: None,
) -> Programs:
    """Loads or compiles all programs, as many at once as there are cores.

    Args:
        cache: where executables are kept between starts; None: compile all.
        on_ready: called with a program's name when it is there, from several threads.
    """
    started = time.monotonic()
    compiled: list[str] = []

    def prepare(program: Program) -> Compiled:
        executable = cache.load(program.name) if cache else None
        if executable is None:
            executable = program.lower().compile()
            compiled.append(program.name)
            if cache:
                cache.store(program.name, executable)
        on_ready(program.name)
        return executable

    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile") as pool:
        executables = list(pool.map(prepare, programs))
    if cache:
        cache.trim()
    return Programs(
        by_name={p.name: e for p, e in zip(programs, executables, strict=True)},
        num_compiled=len(compiled),
        num_loaded=len(programs) - len(compiled),
        seconds=time.monotonic() - started,
    )


class CompileCounter:
    """Counts XLA compilations of the whole process from its creation until `close`."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self.count += 1

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
