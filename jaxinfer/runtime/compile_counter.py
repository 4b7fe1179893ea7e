"""How often XLA compiled: while starting, and afterwards, when it never should."""

from __future__ import annotations

import threading
import weakref

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts XLA compilations of the whole process from its creation on, whoever asks for them.

    They are `startup` until `mark_ready`, and `serving` afterwards. Ends with `close`, or with the
    object: JAX's list of listeners holds only the count.
    """

    def __init__(self) -> None:
        self._tally = _Tally()
        listener = self._tally.on_event
        jax.monitoring.register_event_duration_secs_listener(listener)
        unregister = jax.monitoring.unregister_event_duration_listener
        self._end = weakref.finalize(self, unregister, listener)
        self._end.atexit = False
        self._num_startup: int | None = None

    @property
    def count(self) -> int:
        return self._tally.count

    def mark_ready(self) -> None:
        self._num_startup = self.count

    def by_phase(self) -> dict[str, int]:
        """Events of `startup` and of `serving`."""
        count = self.count
        startup = count if self._num_startup is None else self._num_startup
        return {"startup": startup, "serving": count - startup}

    def close(self) -> None:
        self._end()


class _Tally:
    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self.count += 1
