"""Which pages a request is on, and what of it was there before: hits, eviction, order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.exactness.circumstance import (
    Circumstance,
    Lab,
    NotProved,
    Outcome,
    Outcomes,
    anyone,
    prove,
    settled,
    shared,
    submit,
)
from bench.exactness.probes import NUM_TOKENS as LONGEST
from bench.exactness.probes import Probe, neighbours
from bench.exactness.session import Session
from bench.exactness.subject import Limits
from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.request import Request

NUM_TOKENS = 6
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def pages(limits: Limits, longest_prompt: int) -> Iterator[Circumstance]:
    """All circumstances of this file."""
    page_size = limits.page_size
    yield shared("cold", anyone, _cold, size=1)
    yield shared("warm: a hit at full length", _has_page(page_size), _warm)
    for num_pages in range(1, (longest_prompt - 1) // page_size + 1):
        yield _hit(num_pages, page_size)
    yield _continued(page_size)
    yield shared("pages in another order", anyone, _shuffled)
    yield shared("after its pages were evicted", _has_page(page_size), _evicted)
    yield shared(
        "after its last pages were evicted", _has_page(page_size, 3), _partly_evicted, size=1
    )


def _has_page(page_size: int, number: int = 1) -> Callable[[Probe], bool]:
    """Prompts with so many pages that a hit can give."""
    return lambda probe: (probe.num_prompt - 1) // page_size >= number


def fill(session: Session, lab: Lab, num_pages: int, *, priority: int = 0) -> str:
    """Submits a prompt that finds no page, takes so many and ends at once. Returns: its id."""
    length = min(num_pages * lab.limits.page_size, lab.limits.max_model_len - 1)
    token_ids = lab.rng(num_pages).integers(0, lab.subject.vocab_size, length).tolist()
    own = f"fill {len(session.steps)}"
    return session.submit(
        Request("fill", tuple(token_ids), ONE_TOKEN, priority=priority, cache_salt=own)
    )


def _cold(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """With a prefix index that is empty."""
    session = lab.subject.session()
    ids = submit(session, group, NUM_TOKENS)
    session.drain()

    def proof(request_id: str) -> None:
        prove(session.num_cached(request_id) == 0, "it found cached tokens")

    return settled(session, ids, NUM_TOKENS, proof)


def _warm(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """After itself."""
    session = lab.subject.session()
    submit(session, group, NUM_TOKENS)
    session.drain()
    return _hits(lab, session, group, lambda p: (p.num_prompt - 1) // lab.limits.page_size)


def _hit(num_pages: int, page_size: int) -> Circumstance:
    """After a prompt that begins with exactly these pages and goes on with another token."""

    def run(lab: Lab, group: Sequence[Probe]) -> Outcomes:
        session, length = lab.subject.session(), num_pages * page_size
        for probe in group:
            ids = probe.request.token_ids
            other = (ids[length] + 1) % lab.subject.vocab_size
            session.submit(Request("primer", (*ids[:length], other), ONE_TOKEN))
        session.drain()
        return _hits(lab, session, group, lambda probe: num_pages)

    name = f"a hit on {num_pages} page{'s' * (num_pages > 1)}"
    return shared(name, _has_page(page_size, num_pages), run, family="a hit at a page boundary")


def _hits(
    lab: Lab, session: Session, group: Sequence[Probe], num_pages: Callable[[Probe], int]
) -> Outcomes:
    ids = submit(session, group, NUM_TOKENS)
    session.drain()
    wanted = {ids[p.name]: num_pages(p) * lab.limits.page_size for p in group}

    def proof(request_id: str) -> None:
        found = session.num_cached(request_id)
        prove(found == wanted[request_id], f"{found} cached tokens, not {wanted[request_id]}")

    return settled(session, ids, NUM_TOKENS, proof)


def _continued(page_size: int) -> Circumstance:
    """Its own answer as part of the prompt, on a page that was filled by decoding."""

    def num_before(probe: Probe) -> int:
        """Tokens of an answer that fills a page."""
        return page_size - probe.num_prompt % page_size + 1

    def run(lab: Lab, group: Sequence[Probe]) -> Outcomes:
        session = lab.subject.session()
        firsts = {p.name: session.submit(p.request, max_tokens=num_before(p)) for p in group}
        session.drain()
        answers = {name: session.trace(first) for name, first in firsts.items()}
        seconds: dict[str, str] = {}
        for probe in group:
            token_ids = (*probe.request.token_ids, *answers[probe.name].token_ids)
            longer = replace(probe.request, token_ids=token_ids)
            seconds[probe.name] = session.submit(longer, max_tokens=LONGEST - num_before(probe))
        session.drain()
        outcomes: Outcomes = {}
        for probe in group:
            second = seconds[probe.name]
            found, whole = session.num_cached(second), answers[probe.name]
            outcomes[probe.name] = (
                Outcome((whole.followed_by(session.trace(second)),), LONGEST)
                if found > probe.num_prompt
                else NotProved(f"{found} cached tokens after a prompt of {probe.num_prompt}")
            )
        return outcomes

    def suits(probe: Probe) -> bool:
        """Penalties of what is in the output are others where it is in the prompt."""
        sampling = probe.request.sampling
        has_penalties = sampling.presence_penalty or sampling.frequency_penalty
        is_long_enough = num_before(probe) + 2 <= LONGEST
        return is_long_enough and not probe.may_end_early and not has_penalties

    return shared("a hit on its own answer", suits, run)


def _shuffled(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """The free list in random order, and other sequences' leftovers on the pages."""
    rng = np.random.default_rng(len(group))
    session = lab.subject.session(shuffle=rng, cache=False)
    for request in neighbours(rng, 2 * len(group), lab.subject.vocab_size):
        session.submit(request)
    session.drain()
    ids = submit(session, group, NUM_TOKENS)
    session.drain()

    def proof(request_id: str) -> None:
        own = next(session.sightings(request_id)).pages
        in_order = tuple(range(len(own)))
        prove(own != in_order, f"its pages were {own}")
        prove(len(own) < 4 or sorted(own) != list(own), f"its pages were {own}, in order")

    return settled(session, ids, NUM_TOKENS, proof)


def _evicted(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Warm once, then something took all pages."""
    page_size = lab.limits.page_size
    wanted = sum(-(-(probe.num_prompt + NUM_TOKENS) // page_size) for probe in group)
    num_pages = min(wanted + 4, lab.limits.num_pages, lab.limits.max_model_len // page_size)
    session = lab.subject.session(num_pages=num_pages)
    ids = submit(session, group, NUM_TOKENS)
    session.drain()
    fill(session, lab, num_pages)
    session.drain()
    again = submit(session, group, NUM_TOKENS)
    session.drain()
    indexed = {again[name]: session.trace(ids[name]) for name in ids}

    def proof(request_id: str) -> None:
        found = session.num_cached(request_id)
        prove(found == 0 and len(indexed[request_id]) > 0, f"it found {found} cached tokens")

    return settled(session, again, NUM_TOKENS, proof)


def _partly_evicted(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Warm once, then something took some of the pages: those behind go first."""
    (probe,) = group
    page_size = lab.limits.page_size
    num_full = (probe.num_prompt + NUM_TOKENS - 1) // page_size
    session = lab.subject.session(num_pages=num_full + 3)
    submit(session, group, NUM_TOKENS)
    session.drain()
    fill(session, lab, session.pool.pages_free + 2)
    session.drain()
    ids = submit(session, group, NUM_TOKENS)
    session.drain()
    full = (probe.num_prompt - 1) // page_size * page_size

    def proof(request_id: str) -> None:
        found = session.num_cached(request_id)
        prove(0 < found < full, f"it found {found} cached tokens of {full}")

    return settled(session, ids, NUM_TOKENS, proof)
