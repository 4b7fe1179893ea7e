"""The same model built again from serialized programs, here or in a process of its own.

`python -m bench.exactness.restart` is that process: a pickled configuration and requests come in on
stdin, what they gave goes out on stdout.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.exactness.circumstance import (
    Circumstance,
    Lab,
    NotProved,
    Outcome,
    Outcomes,
    anyone,
    shared,
)
from bench.exactness.probes import Probe
from bench.exactness.subject import Restart, Subject
from bench.exactness.trace import Trace
from jaxinfer.build import Built, build
from jaxinfer.config import EngineConfig
from jaxinfer.scheduling.request import Request

NUM_TOKENS = 8
NOTHING_COMPILED = " 0 compiled"  # ends what a build says about its programs

ROOT = Path(__file__).parents[2]


def restart() -> Iterator[Circumstance]:
    """All circumstances of this file."""
    yield shared("after a restart", anyone, _restarted)


def _restarted(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    assert lab.subject.restart is not None, "this subject has no way to restart"
    requests = [
        replace(probe.request, sampling=replace(probe.request.sampling, max_tokens=NUM_TOKENS))
        for probe in group
    ]
    traces, about = lab.subject.restart(requests)
    outcomes: Outcomes = {}
    for probe, trace in zip(group, traces, strict=True):
        is_loaded = about.endswith(NOTHING_COMPILED)
        outcomes[probe.name] = (
            Outcome((trace,), NUM_TOKENS) if is_loaded else NotProved(f"its programs were {about}")
        )
    return outcomes


def in_this_process(rebuild: Callable[[], Built]) -> Restart:
    """Builds again beside the first."""

    def run(requests: Sequence[Request]) -> tuple[list[Trace], str]:
        built = rebuild()
        session = Subject(built).session()
        ids = [session.submit(request) for request in requests]
        session.drain()
        return [session.trace(i) for i in ids], str(built.summary["programs"])

    return run


def in_another_process(config: EngineConfig) -> Restart:
    """Raises: subprocess.CalledProcessError; the process' own words are on stderr."""

    def run(requests: Sequence[Request]) -> tuple[list[Trace], str]:
        command = [sys.executable, "-m", "bench.exactness.restart"]
        said = subprocess.run(
            command,
            input=pickle.dumps((config, requests)),
            stdout=subprocess.PIPE,
            cwd=ROOT,
            check=True,
        )
        return pickle.loads(said.stdout)

    return run


def main() -> None:
    config, requests = pickle.load(sys.stdin.buffer)
    answer = in_this_process(lambda: build(config))(requests)
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    main()
