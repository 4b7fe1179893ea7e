"""Requests that lose their pages to a better one and are computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from bench.exactness.circumstance import (
    Circumstance,
    Lab,
    Outcomes,
    Run,
    lasting,
    prove,
    settled,
    shared,
    submit,
)
from bench.exactness.pages import fill
from bench.exactness.probes import Probe
from bench.exactness.subject import Limits

NUM_TOKENS = 24  # long enough to be preempted again after a bit of progress
GROUP = 2  # probes that are preempted together
CHUNK = 64  # tokens of a step: small, so that the better one starts with little and grows
BETTER = -1  # priority


def preemption(limits: Limits) -> Iterator[Circumstance]:
    """All circumstances of this file."""
    chunk = CHUNK
    if limits.buckets.max_tokens < chunk:
        return  # the better one would grow so slowly that the probes end first

    def in_two_chunks(probe: Probe) -> bool:
        return probe.num_prompt > chunk

    yield shared("preempted once", lasting, _preempted(1, chunk, cache=True), size=GROUP)
    yield shared("preempted twice", lasting, _preempted(2, chunk, cache=True), size=GROUP)
    yield shared(
        "preempted twice, without a prefix index",
        lasting,
        _preempted(2, chunk, cache=False),
        size=GROUP,
    )
    yield shared("preempted in its prefill", in_two_chunks, _in_prefill(chunk), size=1)


def _preempted(times: int, chunk: int, *, cache: bool) -> Run:
    """A better request arrives that needs the whole pool, each time when all of them run."""

    def run(lab: Lab, group: Sequence[Probe]) -> Outcomes:
        room = _room(lab, group, chunk)
        session = lab.subject.session(max_tokens=chunk, num_pages=room, cache=cache)
        longest_first = sorted(group, key=lambda probe: -probe.num_prompt)
        ids = submit(session, longest_first, NUM_TOKENS)
        session.step_until(lambda: all(map(session.num_out, ids.values())))
        for _ in range(times):
            better = fill(session, lab, room, priority=BETTER)
            session.step_until(partial(session.is_over, better))
            session.step_until(lambda: not session.pool.num_waiting)
        session.drain()

        def proof(request_id: str) -> None:
            found = session.num_preemptions(request_id)
            prove(found == times, f"it was preempted {found} times")

        return settled(session, ids, NUM_TOKENS, proof)

    return run


def _in_prefill(chunk: int) -> Run:
    """The better request comes when the first chunk has been computed."""

    def run(lab: Lab, group: Sequence[Probe]) -> Outcomes:
        session = lab.subject.session(max_tokens=chunk, num_pages=_room(lab, group, chunk))
        ids = submit(session, group, NUM_TOKENS)
        session.step()
        fill(session, lab, session.pool.pages_total, priority=BETTER)
        (request_id,) = ids.values()
        session.step_until(lambda: session.num_out(request_id) > 0)
        first = next(session.sightings(request_id))
        started = sum(step.num_new == (chunk,) for step in session.steps)
        session.drain()

        def proof(request_id: str) -> None:
            found = session.num_preemptions(request_id)
            prove(found == 1 and first.place == 0, f"it was preempted {found} times")
            prove(started > 0, "it did not start before")

        return settled(session, ids, NUM_TOKENS, proof)

    return run


def _room(lab: Lab, group: Sequence[Probe], chunk: int) -> int:
    """Pages for the group and for the first chunk of another, with what a start must leave."""
    page_size = lab.limits.page_size
    own = sum(-(-(probe.num_prompt + NUM_TOKENS) // page_size) for probe in group)
    return own + -(-chunk // page_size) + len(group) + 1
