"""Requests that lose their pages to a better one and are computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from bench.exactness.probes import LASTING, Probe, neighbours
from bench.exactness.subject import Limits

NUM_TOKENS = 24  # long enough to be preempted again after a bit of progress
GROUP = 2  # probes that are preempted together
CHUNK = 64  # tokens of a step: small, so that the better one starts with little and grows
BETTER = -1  # priority
UNTIL_IT_GROWS = 6  # tokens that a better one decodes before it needs another page


def preemption(limits: Limits) -> Iterator[Circumstance]:
    """All circumstances of this file."""
    chunk = CHUNK
    if limits.buckets.max_tokens < chunk:
        return  # the better one would grow so slowly that the probes end first

    yield shared("preempted once", lasting, _preempted(1, chunk, cache=True), size=GROUP)
    yield shared("preempted twice", lasting, _preempted(2, chunk, cache=True), size=GROUP)
    yield shared(
        "preempted twice, without a prefix index",
        lasting,
        _preempted(2, chunk, cache=False),
        size=GROUP,
    )
    room = -(-(chunk - 1) // limits.page_size) + 1

    def outgrows_room(probe: Probe) -> bool:
        return probe.num_prompt > room * limits.page_size

    yield shared("preempted in its prefill", outgrows_room, _in_prefill(chunk, room), size=1)


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


def _in_prefill(chunk: int, room: int) -> Run:
    """A better request that decodes leaves so many pages; when it needs another, they are full of
    the beginning of the probe's prompt.
    """

    def run(lab: Lab, group: Sequence[Probe]) -> Outcomes:
        (probe,) = group
        page_size = lab.limits.page_size
        num_pages = room + -(-(probe.num_prompt + NUM_TOKENS) // page_size)
        session = lab.subject.session(max_tokens=chunk, num_pages=num_pages)
        length = (num_pages - room) * page_size - UNTIL_IT_GROWS
        (better,) = neighbours(
            lab.rng(length),
            1,
            lab.subject.vocab_size,
            lengths=(length, length),
            num_out=(2 * UNTIL_IT_GROWS, 2 * UNTIL_IT_GROWS),
            kinds=LASTING,
        )
        first = session.submit(replace(better, priority=BETTER))
        session.step_until(lambda: session.num_out(first) > 0)
        num_steps = len(session.steps)
        ids = submit(session, group, NUM_TOKENS)
        session.step_until(lambda: session.num_out(ids[probe.name]) > 0)
        before_a_token = session.pool.num_preemptions
        session.drain()

        def proof(request_id: str) -> None:
            started = any(chunk - 1 in step.num_new for step in session.steps[num_steps:])
            found = session.num_preemptions(request_id), before_a_token
            prove(started and found == (1, 1), f"preempted, and before its first token: {found}")

        return settled(session, ids, NUM_TOKENS, proof)

    return run


def _room(lab: Lab, group: Sequence[Probe], chunk: int) -> int:
    """Pages for the group and for the first chunk of another, with what a start must leave."""
    page_size = lab.limits.page_size
    own = sum(-(-(probe.num_prompt + NUM_TOKENS) // page_size) for probe in group)
    return own + -(-chunk // page_size) + len(group) + 1
