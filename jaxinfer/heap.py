"""The process's heap: what was freed goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def trim_heap() -> None:
    """Gives back host memory that nobody uses any more, in milliseconds.

    JAX lets go of host arrays that were parameters when Python collects garbage, the youngest will
    do. The C library keeps what is freed, some 30 MiB for each thread that has compiled, until it
    is told not to (glibc; others know no such call).
    """
    gc.collect(0)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
