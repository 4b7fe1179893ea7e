"""Neighbours: how many, of which kind, when they come and go, and copies of the request itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from bench.exactness.circumstance import (
    Circumstance,
    Lab,
    NotProved,
    Outcome,
    Outcomes,
    Run,
    anyone,
    lasting,
    prove,
    settled,
    shared,
    submit,
)
from bench.exactness.probes import LASTING, Probe, neighbours
from bench.exactness.session import Session
from bench.exactness.subject import Limits
from bench.exactness.trace import Trace

NUM_TOKENS = 8  # that each probe is asked for, where nothing else is said
WHILE_OTHERS_COME = 16
NUM_CHOICES = 3
SHORT = (1, 4)  # tokens of prompts that take no time
ENDLESS = (200, 200)  # output tokens of neighbours that outlive the probes


def company(limits: Limits) -> Iterator[Circumstance]:
    """All circumstances of this file."""
    rows, least = limits.buckets.rows, min(limits.buckets.rows)
    yield shared("1 neighbour", anyone, _beside(1), size=2)
    for number in (most - 1 for most in rows):
        yield shared(f"{number} neighbours", anyone, _beside(number), size=(number + 1) // 2)
    if len(rows) > 1:
        yield shared("neighbours come and go", lasting, _come_and_go, size=least // 2)
    yield shared("a neighbour is aborted", lasting, _abort, size=least - 3)
    yield shared("rides along in a prefill step", lasting, _ride, size=least - 1)
    yield shared("beside itself", lasting, _twins, size=least // 2)
    yield shared("beside its own seed", lambda p: p.is_drawn, _same_seed, size=1)
    yield shared("first of several choices", anyone, _first_choice, size=1)
    yield shared("several choices in company", anyone, _choices, size=1)


def run_out(session: Session, ids: Iterable[str], others: Iterable[str]) -> None:
    """Steps until the requests are over, then ends the others."""
    wanted = list(ids)
    session.step_until(lambda: all(map(session.is_over, wanted)))
    for other in others:
        session.abort(other)
    session.drain()


def most_together(session: Session, request_id: str) -> int:
    """Sequences of the fullest step in which the request drew a token."""
    return max((len(seen.step.num_new) for seen in session.sightings(request_id)), default=0)


def _beside(number: int) -> Run:
    """Half of the company are other probes, the rest are neighbours that were there before."""

    def run(lab: Lab, group: Sequence[Probe]) -> Outcomes:
        session = lab.subject.session()
        num_others = max(1, number + 1 - len(group))  # a probe may end before another draws
        coming = neighbours(
            lab.rng(number, group[0].num_prompt),
            num_others,
            lab.subject.vocab_size,
            lengths=(1, 24),
            num_out=ENDLESS,
            kinds=LASTING,
        )
        others = [session.submit(request) for request in coming]
        session.step_until(lambda: all(map(session.num_out, others)))
        ids = submit(session, group, NUM_TOKENS)
        run_out(session, ids.values(), others)
        least = max(2, num_others + 1)

        def proof(request_id: str) -> None:
            most = most_together(session, request_id)
            prove(most >= least, f"at most {most} sequences ran together, not {least}")

        return settled(session, ids, NUM_TOKENS, proof)

    return run


def _come_and_go(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """The decode bucket grows when neighbours arrive, and shrinks when they have ended."""
    small, large = lab.limits.buckets.rows[:2]
    session = lab.subject.session()
    ids = submit(session, group, WHILE_OTHERS_COME)
    session.step_until(lambda: all(session.num_out(i) > 1 for i in ids.values()))
    for request in neighbours(
        lab.rng(group[0].num_prompt),
        large - len(group),
        lab.subject.vocab_size,
        lengths=SHORT,
        num_out=(4, 6),
    ):
        session.submit(request)
    session.drain()

    def proof(request_id: str) -> None:
        steps = [seen.step for seen in session.sightings(request_id)]
        buckets = [step.bucket for step in steps if step.kind == "decode"]
        changes = [b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] != b]
        prove(changes == [small, large, small], f"its decode buckets were {changes}")

    return settled(session, ids, WHILE_OTHERS_COME, proof)


def _abort(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Of a neighbour that decodes, and of one in the middle of its prefill."""
    session = lab.subject.session(max_tokens=lab.limits.buckets.tokens[0])
    rng, vocab_size = lab.rng(len(group)), lab.subject.vocab_size
    mates = neighbours(rng, 2, vocab_size, lengths=SHORT, num_out=ENDLESS, kinds=LASTING)
    decoding, staying = map(session.submit, mates)
    session.step_until(lambda: session.num_out(staying) > 0)
    ids = submit(session, group, NUM_TOKENS)
    session.step_until(lambda: any(session.num_out(i) > 1 for i in ids.values()))
    (long,) = neighbours(rng, 1, vocab_size, lengths=(100, 100))
    prefilling = session.submit(long)
    session.step()
    before = session.num_out(decoding), session.num_out(prefilling)
    session.abort(prefilling)
    session.abort(decoding)
    num_steps = len(session.steps)
    run_out(session, ids.values(), [staying])

    def proof(request_id: str) -> None:
        aborted = all(map(session.was_aborted, (decoding, prefilling)))
        prove(aborted and before[0] > 0 and before[1] == 0, f"aborted with {before} tokens")
        later = set(map(id, session.steps[num_steps:]))
        after = [seen for seen in session.sightings(request_id) if id(seen.step) in later]
        prove(len(after) > 0, "it had ended before")

    return settled(session, ids, NUM_TOKENS, proof)


def _ride(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Probes decode while a long prompt comes in chunks. It is not shorter than they are, or it
    would come before them.
    """
    session = lab.subject.session(max_tokens=lab.limits.buckets.tokens[0])
    ids = submit(session, group, NUM_TOKENS)
    length = max(100, *(probe.num_prompt for probe in group))
    (long,) = neighbours(lab.rng(1), 1, lab.subject.vocab_size, lengths=(length, length))
    session.submit(long)
    session.drain()

    def proof(request_id: str) -> None:
        places = [
            seen.place
            for seen in session.sightings(request_id)
            if seen.step.kind == "prefill" and seen.num_new == 1 and seen.place > 0
        ]
        prove(len(places) > 1, f"it rode along for tokens {places} only")

    return settled(session, ids, NUM_TOKENS, proof)


def _twins(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Twice at once, with one seed."""
    session = lab.subject.session()
    firsts, seconds = (
        {p.name: session.submit(p.request, max_tokens=NUM_TOKENS) for p in group} for _ in range(2)
    )
    session.drain()
    outcomes: Outcomes = {}
    for name, first in firsts.items():
        drawn = Counter(id(seen.step) for seen in session.sightings(first))
        traces = session.trace(first), session.trace(seconds[name])
        met = 2 in drawn.values()
        outcomes[name] = Outcome(traces, NUM_TOKENS) if met else NotProved("they never met")
    return outcomes


def _same_seed(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Other prompts draw with the same seed beside it."""
    session = lab.subject.session()
    ids = submit(session, group, NUM_TOKENS)
    seed = group[0].request.sampling.seed
    rng, vocab_size = lab.rng(group[0].num_prompt), lab.subject.vocab_size
    for request in neighbours(rng, 2, vocab_size, lengths=SHORT, num_out=(8, 8)):
        session.submit(request, seed=seed, temperature=1.0)
    session.drain()
    most = max(
        max(Counter(sampled.seed for sampled in step.sampled).values(), default=0)
        for step in session.steps
    )

    def proof(request_id: str) -> None:
        prove(most > 1, "no step drew twice with its seed")

    return settled(session, ids, NUM_TOKENS, proof)


def _first_choice(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """The first choice of several is what one alone is."""
    return {p.name: Outcome(_choices_alone(lab, p)[:1], NUM_TOKENS) for p in group}


def _choices(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    """Every choice of several in company is what it is without."""
    (probe,) = group
    session = lab.subject.session()
    rng, vocab_size = lab.rng(probe.num_prompt, 1), lab.subject.vocab_size
    mates = neighbours(rng, 3, vocab_size, lengths=SHORT, num_out=ENDLESS, kinds=LASTING)
    others = [session.submit(request) for request in mates]
    session.step()
    request_id = session.submit(probe.request, n=NUM_CHOICES, max_tokens=NUM_TOKENS)
    run_out(session, [request_id], others)
    got = tuple(session.trace(request_id, index) for index in range(NUM_CHOICES))
    if most_together(session, request_id) <= NUM_CHOICES:
        return {probe.name: NotProved("it was never in company")}
    return {probe.name: Outcome(got, NUM_TOKENS, want=_choices_alone(lab, probe))}


def _choices_alone(lab: Lab, probe: Probe) -> tuple[Trace, ...]:
    def run() -> tuple[Trace, ...]:
        session = lab.subject.session()
        request_id = session.submit(probe.request, n=NUM_CHOICES, max_tokens=NUM_TOKENS)
        session.drain()
        return tuple(session.trace(request_id, index) for index in range(NUM_CHOICES))

    return lab.once(("choices", probe.name), run)
