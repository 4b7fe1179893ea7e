"""An engine whose seconds can be computed by hand, and the clock that it moves."""

from __future__ import annotations

from collections.abc import Sequence

from bench.machine import Reading
from bench.workloads import Request

PER_INPUT, PER_OUTPUT = 0.001, 0.01  # seconds


class Stopwatch:
    """Moves only when something runs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[list[Request]] = []  # what was asked, all at once, in order

    def __call__(self) -> float:
        return self.now

    def run(self, requests: Sequence[Request]) -> None:
        """A millisecond per prompt token and ten per token after the first; no batching."""
        self.calls.append(list(requests))
        for token_ids, num_output in requests:
            self.now += len(token_ids) * PER_INPUT + (num_output - 1) * PER_OUTPUT

    def read_clocks(self) -> Reading:
        """One core of ours is busy all the time, and nobody else's."""
        return Reading(self.now, own_s=self.now, busy_s=self.now)
