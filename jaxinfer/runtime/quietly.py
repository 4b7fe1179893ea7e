"""Long work beside an engine that serves, on a thread to which others are preferred."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Result = TypeVar("Result")

NICE = 10
"""A tenth of a core that others want too. Not 19, a sixtieth: the thread may hold Python's lock."""


def run_quietly(work: Callable[[], Result]) -> Result:
    """Runs `work` on a thread of its own and waits for it.

    On Linux that thread and those that it starts have a low priority; XLA's own threads, which
    compile and compute for everybody, have not. A thread cannot take its priority back, so it ends
    with the work.
    """
    with ThreadPoolExecutor(1, "quiet", _become_nice) as pool:
        return pool.submit(copy_context().run, work).result()


def _become_nice() -> None:
    if sys.platform == "linux":  # elsewhere niceness is of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
