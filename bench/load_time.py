"""Seconds from starting a Python to a model that is READY, in a process of its own.

`python -m bench.load_time FIELDS` is that process; FIELDS: a JSON object of EngineConfig's fields.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.machine import peak_memory_bytes
from bench.workloads import Clock, Figures
from checkpoints.errors import CheckpointError
from jaxinfer import LLM, JaxInferError


class LoadFailed(Exception):
    """The process ended without a model; its own words are on stderr."""


def time_load(fields: Mapping[str, Any], clock: Clock) -> Figures:
    """Raises: LoadFailed."""
    command = [sys.executable, "-m", "bench.load_time", json.dumps(dict(fields))]
    start = clock()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        seconds = clock() - start
    if process.returncode or not ready:
        raise LoadFailed(f"loading ended with exit code {process.returncode}; see above")
    peak = json.loads(ready)["peak_bytes"]
    return {"load_s": seconds} | ({} if peak is None else {"loaded_bytes": peak})


def main(argv: Sequence[str]) -> int:
    """Loads, and says so in one line. Returns: the exit code."""
    try:
        LLM(show_progress=False, **json.loads(argv[0]))
    except (JaxInferError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"peak_bytes": peak_memory_bytes()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
