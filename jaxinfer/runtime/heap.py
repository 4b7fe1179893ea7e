"""The process's heap: what was freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Gives back what the C library keeps of freed memory, if it can: glibc does, in milliseconds.

    Each thread that compiles may leave some 30 MiB otherwise.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
