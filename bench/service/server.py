"""A server as a child process: started, watched through its metrics, and ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.service.faults import FaultRates

ROOT = Path(__file__).parents[2]
READY = re.compile(r"READY (http://\S+) serves")
START_S, END_S = 300.0, 60.0  # that it has to be READY, and to drain


class ServerFailed(Exception):
    """The server did not start, or did not end by itself; its last words are in the message."""


@dataclass(frozen=True, slots=True)
class Server:
    """One that is READY."""

    url: str
    process: subprocess.Popen[bytes]

    def metrics(self) -> dict[str, float]:
        """Name -> value, summed over labels; and `name{value of the last label}` for each."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("jaxinfer:")
                last = [value for key, value in sample.labels.items() if key != "model_name"]
                found[name] = found.get(name, 0.0) + sample.value
                if last:
                    found[f"{name}{{{last[-1]}}}"] = sample.value
        return found


@contextmanager
def started(
    model: str, flags: Sequence[str] = (), *, rates: FaultRates | None = None
) -> Generator[Server]:
    """Serves `model` on a free port until the block ends. Raises: ServerFailed."""
    faults = json.dumps(asdict(rates or FaultRates()))
    command = [sys.executable, "-m", "bench.service.child", faults, model, "--port", "0", *flags]
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log)
        try:
            yield Server(_url(process, log), process)
        finally:
            process.send_signal(signal.SIGTERM)
            _wait(process)


def _url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Where it listens, once it is READY."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        log.seek(0)
        ready = READY.search(log.read().decode(errors="replace"))
        if ready is not None:
            return ready[1]
        time.sleep(0.1)
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    raise ServerFailed(lines[-1] if lines else "the server said nothing")


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise ServerFailed(f"the server did not end within {END_S:g} s") from None
