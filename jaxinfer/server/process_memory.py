"""What the operating system says of this process's memory. No imports of ours."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process; where the system does not tell, its peak, or 0."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return _peak_of_usage()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that was ever resident; 0 where the system does not tell.

    Not getrusage where /proc is there: its peak is also that of the process that started this one.
    """
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else _peak_of_usage()


def _peak_of_usage() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
