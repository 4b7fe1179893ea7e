"""Another version of the weights beside the request's own: in the steps between its steps, in the
pages beside its pages, and as the current one in the middle of its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.exactness.circumstance import (
    Circumstance,
    Lab,
    Outcomes,
    lasting,
    prove,
    settled,
    shared,
    submit,
)
from bench.exactness.company import ENDLESS, SHORT, WHILE_OTHERS_COME
from bench.exactness.probes import LASTING, Probe, neighbours
from bench.exactness.subject import Limits

NUM_TOKENS = 6
OTHER = "other weights"
MIN_TURNS = 2  # steps of the other version that are proved between steps of the request


def versions(limits: Limits) -> Iterator[Circumstance]:
    """All circumstances of this file."""
    size = min(limits.buckets.rows) // 2
    yield shared("another version takes turns and becomes current", lasting, _swap, size=size)
    yield shared(
        "the same tokens cached under another version",
        lambda probe: probe.num_prompt > limits.page_size,
        _no_hit,
    )


def _swap(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Neighbours of another version come, it becomes current, more come that name none, it is
    rolled back and dropped, all while the requests draw their tokens.
    """
    session = lab.subject.session()
    lab.subject.add_version(session, OTHER)
    rng, vocab_size = lab.rng(group[0].num_prompt, 2), lab.subject.vocab_size
    first, *later = neighbours(rng, 3, vocab_size, lengths=SHORT, num_out=ENDLESS, kinds=LASTING)
    others = [session.submit(replace(first, version=OTHER))]
    ids = submit(session, group, WHILE_OTHERS_COME)
    session.step_until(lambda: all(session.num_out(i) > 1 for i in ids.values()))
    own = session.version
    session.serve_version(OTHER)
    others += map(session.submit, later)
    session.step_until(lambda: all(session.num_out(i) > 1 for i in others))
    session.serve_version(own)
    session.drop_version(OTHER)
    for other in others:
        session.abort(other)
    num_steps = len(session.steps)
    session.drain()

    def proof(request_id: str) -> None:
        numbers = [seen.number for seen in session.sightings(request_id)]
        between = session.steps[numbers[0] : numbers[-1]]
        num_turns = sum(step.version == OTHER for step in between)
        prove(num_turns >= MIN_TURNS, f"{num_turns} steps of the other version came in between")
        is_own = all(seen.step.version == own for seen in session.sightings(request_id))
        prove(is_own, "it was computed by the other version, too")
        prove(numbers[-1] >= num_steps, "it had ended before the other version was dropped")
        prove(session.versions == (own,), f"the versions at the end are {session.versions}")

    return settled(session, ids, WHILE_OTHERS_COME, proof)


def _no_hit(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """The other version finds its own pages again; the request finds none of them."""
    session = lab.subject.session()
    lab.subject.add_version(session, OTHER)
    own = session.version
    session.serve_version(OTHER)
    twins: list[str] = []
    for _ in range(2):
        twins = [session.submit(p.request, max_tokens=1, seed=None) for p in group]
        session.drain()
    session.serve_version(own)
    ids = submit(session, group, NUM_TOKENS)
    session.drain()
    session.drop_version(OTHER)
    twin_of = dict(zip(ids.values(), twins, strict=True))

    def proof(request_id: str) -> None:
        prove(session.num_cached(twin_of[request_id]) > 0, "its tokens were not cached")
        found = session.num_cached(request_id)
        prove(found == 0, f"it found {found} tokens that another version computed")

    return settled(session, ids, NUM_TOKENS, proof)
