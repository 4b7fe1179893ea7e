"""Work that gives way to everybody else's."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

R = TypeVar("R")

LOWEST = 19  # nice


def at_low_priority(work: Callable[[], R]) -> R:
    """Runs it on a thread of its own, and waits for it.

    On Linux the thread, and those that it starts, get a core only when nobody else wants one. Other
    systems know no priority of a thread without more rights: there it runs as any other. The
    process can end meanwhile.
    """
    done: Future[R] = Future()

    def run() -> None:
        _lower()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="low-priority", daemon=True).start()
    return done.result()


def _lower() -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
