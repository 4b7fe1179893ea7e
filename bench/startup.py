"""`python -m bench.startup`: from starting `serve.py` to READY, with a cold and with a warm cache.

Each start is a process of its own. Flags that are not of this program go to serve.py.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import PROC, cpu_seconds, peak_memory_bytes, read_clocks
from bench.offline import Settings, report
from bench.results import Failure, Outcome, Result, repeat
from bench.workloads import Figures
from checkpoints.errors import CheckpointError
from checkpoints.resolve import resolve
from jaxinfer import EngineConfig, JaxInferError
from jaxinfer.server.flags import count

ROOT = Path(__file__).parents[1]
READY = re.compile(r"READY (http://\S+) serves")
PROGRAMS = re.compile(r"programs: (\d+) loaded, (\d+) compiled")
PHASE = re.compile(r'jaxinfer:startup_seconds{.*phase="([^"]+)".*} (\S+)')


class StartFailed(Exception):
    """The server ended, or was not ready in time; its last words are in the message."""


@dataclass(frozen=True, slots=True)
class Starts:
    """What is started, and how often."""

    model: str  # a path
    flags: tuple[str, ...]  # of serve.py
    num_cold: int
    num_warm: int

    def outcomes(self, folder: Path) -> Iterator[Outcome]:
        """Cold starts, each with an empty cache below `folder`; then warm ones with the last."""
        caches = (folder / str(i) for i in range(2 * self.num_cold))
        last = folder / "none"

        def cold() -> Figures:
            nonlocal last
            last = next(caches)
            return start(self, last)

        def warm() -> Figures:
            return start(self, last)

        for name, title, once, times in (
            ("cold", "serve.py to READY, nothing compiled", cold, self.num_cold),
            ("warm", "serve.py to READY, all compiled", warm, self.num_warm),
        ):
            try:
                yield Result.of(name, title, repeat(once, times, read_clocks), times)
            except StartFailed as error:
                yield Failure(name, title, str(error))


def start(starts: Starts, cache_dir: Path) -> Figures:
    """One start, up to READY. Raises: StartFailed."""
    flags = ["--port", "0", "--cache-dir", str(cache_dir), *starts.flags]
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "serve.py", starts.model, *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            return _figures(process, begin) | {"cache_bytes": _bytes_below(cache_dir / "programs")}
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            process.stderr.read()  # a full pipe would stop it


def _figures(process: subprocess.Popen[str], begin: float) -> Figures:
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line.rstrip())
        ready = READY.search(line)
        if ready is not None:
            seconds = time.monotonic() - begin
            own = PROC / str(process.pid)
            told = {"ready_cpu_s": cpu_seconds(own), "peak_bytes": peak_memory_bytes(own)}
            figures = {name: value for name, value in told.items() if value is not None}
            return {"ready_s": seconds} | figures | _phases(ready[1], seconds) | _programs(lines)
    raise StartFailed(lines[-1] if lines else "the server said nothing")


def _phases(url: str, ready_s: float) -> Figures:
    """As the server measured them, and what they leave: its own imports before its clock runs, and
    JAX's after that. Weights pass beside programs and pool.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/metrics", timeout=10) as reply:
        found = dict(PHASE.findall(reply.read().decode()))
    total = float(found.pop("total"))
    named = {f"{name.replace(' ', '_')}_s": float(value) for name, value in found.items()}
    beside = max(named["load_weights_s"], named["compile_s"] + named["allocate_KV_pool_s"])
    rest = {"import_s": ready_s - total, "import_jax_s": total - named["find_model_s"] - beside}
    return rest | named


def _programs(lines: Sequence[str]) -> Figures:
    found = next(filter(None, map(PROGRAMS.search, lines)))
    return {"num_loaded": float(found[1]), "num_compiled": float(found[2])}


def _bytes_below(folder: Path) -> float:
    return float(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))


def parse(argv: Sequence[str]) -> tuple[Settings, Starts]:
    """A bad command line ends the process with exit code 2, as argparse does.

    Raises: CheckpointError for a model that is not there and cannot be fetched.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--model", default=EngineConfig().source.model, help="as of serve.py")
    parser.add_argument("--reps", type=count, default=5, help="warm starts (default: 5)")
    parser.add_argument("--cold-reps", type=count, default=1, help="cold starts (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append JSON lines to it")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    given, flags = parser.parse_known_args(argv)
    path = resolve(given.model)  # fetched before the clock runs
    settings = Settings(
        engine={"model": given.model, "flags": " ".join(flags)},
        workloads={},
        num_reps=given.reps,
        out=given.out,
        as_json=given.json,
    )
    return settings, Starts(str(path), tuple(flags), given.cold_reps, given.reps)


def main(argv: Sequence[str]) -> int:
    """Returns: the exit code."""
    try:
        settings, starts = parse(argv)
        with tempfile.TemporaryDirectory() as folder:
            return report(settings, starts.outcomes(Path(folder)), sys.stdout)
    except (JaxInferError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
