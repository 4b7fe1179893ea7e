"""How often XLA compiled: while starting, for another version, and while serving, when it never
should.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

Item = TypeVar("Item")
Result = TypeVar("Result")

_is_for_version: ContextVar[bool] = ContextVar("is_for_version", default=False)


@contextmanager
def compiling_for_version() -> Generator[None]:
    """What is compiled inside is for another version of the model that is served.

    JAX tells of a compilation on the thread that asked for it, so this holds for the thread that is
    inside, and for those that it hands work to with `with_context`.
    """
    token = _is_for_version.set(True)
    try:
        yield
    finally:
        _is_for_version.reset(token)


def with_context(work: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """`work` for other threads, several at once, whose compilations count as the caller's."""
    context = copy_context()

    def inside(item: Item) -> Result:
        return context.copy().run(work, item)  # one copy cannot be entered twice at once

    return inside


class CompileCounter:
    """Counts XLA compilations of the whole process from its creation on, whoever asks for them.

    Those inside `compiling_for_version` are of `version`; the others are `startup` until
    `mark_ready`, and `serving` afterwards. Ends with `close`, or with the object: JAX's list of
    listeners holds only the count.
    """

    def __init__(self) -> None:
        self._tally = _Tally()
        listener = self._tally.on_event
        jax.monitoring.register_event_duration_secs_listener(listener)
        unregister = jax.monitoring.unregister_event_duration_listener
        self._end = weakref.finalize(self, unregister, listener)
        self._end.atexit = False

    @property
    def count(self) -> int:
        """Of all phases."""
        return sum(self.by_phase().values())

    def mark_ready(self) -> None:
        self._tally.is_ready = True

    def by_phase(self) -> dict[str, int]:
        """Events of `startup`, of `serving` and of `version`."""
        return self._tally.read()

    def close(self) -> None:
        self._end()


class _Tally:
    def __init__(self) -> None:
        self.is_ready = False
        self._by_phase = Counter(startup=0, serving=0, version=0)
        self._lock = threading.Lock()

    def on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event != COMPILE_EVENT:
            return
        phase = "serving" if self.is_ready else "startup"
        with self._lock:
            self._by_phase["version" if _is_for_version.get() else phase] += 1

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._by_phase)
