"""Every row of every decode bucket: a request walks through them while others end around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bench.exactness.circumstance import Circumstance, Lab, Outcome, prove
from bench.exactness.company import run_out
from bench.exactness.probes import LASTING, Probe, neighbours
from bench.exactness.session import Session
from bench.exactness.subject import Limits
from bench.exactness.trace import Trace

LEAST_PROMPT = 24  # tokens: longer than the shorter neighbours ever get
SHORTER = (1, 3)  # tokens of their prompts
ENDLESS = (400, 400)  # output tokens
MOST_ROWS = 20  # of one walk
SLACK = 5  # tokens of a walk besides one per row


def places(limits: Limits) -> Iterator[Circumstance]:
    """One circumstance for each row of each bucket."""
    rows = limits.buckets.rows
    for below, bucket in zip((0, *rows), rows, strict=False):
        for row in range(bucket):
            yield _place(row, bucket, below)


def is_walker(probe: Probe) -> bool:
    """Of a length between those of its shorter and its longer neighbours."""
    return LEAST_PROMPT <= probe.num_prompt <= 3 * LEAST_PROMPT and not probe.may_end_early


def _place(row: int, bucket: int, below: int) -> Circumstance:
    """Args: below: the next smaller bucket, or 0."""

    def happen(lab: Lab, probe: Probe) -> Outcome:
        walks = lab.once(("walks", bucket, probe.name), lambda: _walks(lab, probe, bucket, below))
        for walk in walks:
            found = tuple(place for place, at in walk.rows.items() if at == row)
            if found:
                return Outcome((walk.trace,), len(walk.trace), places=found)
        seen = sorted({at for walk in walks for at in walk.rows.values()})
        prove(False, f"it sat in rows {seen} of {bucket}")
        raise AssertionError

    family = f"every row of {bucket}"
    return Circumstance(f"row {row} of {bucket}", is_walker, happen, family)


class _Walk(NamedTuple):
    trace: Trace
    rows: dict[int, int]  # place of a token -> the row of the bucket in which it was drawn


def _walks(lab: Lab, probe: Probe, bucket: int, below: int) -> list[_Walk]:
    """Rows of a decode step stand in order of their context, and the bucket holds while more than
    `below` of them are left. So a walk goes down as many rows, and a longer neighbour in each row
    above it lets the next walk begin further down.
    """
    most = min(MOST_ROWS, bucket - below)
    return [
        _walk(lab, probe, bucket, top, min(most, top + 1)) for top in range(bucket - 1, -1, -most)
    ]


def _walk(lab: Lab, probe: Probe, bucket: int, top: int, num_rows: int) -> _Walk:
    """Fills the bucket, the probe in row `top`, then ends a shorter neighbour after each step."""
    session = lab.subject.session()
    rng = np.random.default_rng([bucket, top])
    longer = _start(
        lab, session, rng, bucket - 1 - top, (probe.num_prompt + 40, probe.num_prompt + 40)
    )
    shorter = _start(lab, session, rng, top, SHORTER)
    request_id = session.submit(probe.request, max_tokens=num_rows + SLACK)
    session.step_until(lambda: session.num_out(request_id) > 0)
    for neighbour in shorter[: num_rows - 1]:
        session.step()
        session.abort(neighbour)
    run_out(session, [request_id], (*longer, *shorter))
    rows = {
        seen.place: seen.row
        for seen in session.sightings(request_id)
        if (seen.step.kind, seen.step.bucket) == ("decode", bucket)
    }
    return _Walk(session.trace(request_id), rows)


def _start(
    lab: Lab, session: Session, rng: np.random.Generator, number: int, lengths: tuple[int, int]
) -> list[str]:
    """Neighbours that decode."""
    requests = neighbours(
        rng, number, lab.subject.vocab_size, lengths=lengths, num_out=ENDLESS, kinds=LASTING
    )
    ids = [session.submit(request) for request in requests]
    session.step_until(lambda: all(map(session.num_out, ids)))
    return ids
