"""How a prompt is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.exactness.circumstance import (
    Circumstance,
    Lab,
    Outcome,
    Outcomes,
    prove,
    settled,
    shared,
    submit,
)
from bench.exactness.company import run_out
from bench.exactness.probes import LASTING, Probe, neighbours
from bench.exactness.subject import Limits

SIZES = (8, 16, 24, 32, 64, 100, 128, 256, 512)
SMALL_SIZES = (1, 3, 8)  # what decoding neighbours leave of the smallest step
MAX_SMALL_CHUNKS = 20  # of a prompt, so that a run ends soon
NUM_TOKENS = 4
ENDLESS = (200, 200)


def chunks(limits: Limits) -> Iterator[Circumstance]:
    """All circumstances of this file."""
    buckets = limits.buckets
    for size in SIZES:
        if size <= buckets.max_tokens:
            yield _alone_in_chunks(size)
    for size in SMALL_SIZES:
        if buckets.tokens[0] - size < buckets.max_rows:
            yield _beside_riders(size, buckets.tokens[0])


def _alone_in_chunks(size: int) -> Circumstance:
    """Steps of `size` tokens."""

    def happen(lab: Lab, probe: Probe) -> Outcome:
        session = lab.subject.session(max_tokens=size)
        ids = submit(session, [probe], NUM_TOKENS)
        session.drain()
        cut = [step.num_new for step in session.steps if step.kind == "prefill"]
        whole, rest = divmod(probe.num_prompt, size)
        want = [(size,)] * whole + ([(rest,)] if rest > 1 else [])
        prove(cut == want, f"chunks were {cut}")
        return Outcome((session.trace(ids[probe.name]),), NUM_TOKENS)

    return Circumstance(f"chunks of {size}", lambda probe: probe.num_prompt > size, happen)


def _beside_riders(size: int, budget: int) -> Circumstance:
    """Steps of `budget` tokens of which decoding neighbours take all but `size`."""

    def run(lab: Lab, group: Sequence[Probe]) -> Outcomes:
        session = lab.subject.session(max_tokens=budget)
        riders = neighbours(
            lab.rng(size),
            budget - size,
            lab.subject.vocab_size,
            lengths=(1, 8),
            num_out=ENDLESS,
            kinds=LASTING,
        )
        others = [session.submit(request) for request in riders]
        session.step_until(lambda: all(map(session.num_out, others)))
        num_steps = len(session.steps)
        ids = submit(session, group, NUM_TOKENS)
        run_out(session, ids.values(), others)
        (probe,) = group
        cut = [step.num_new for step in session.steps[num_steps:] if max(step.num_new) > 1]
        sizes = [max(num_new) for num_new in cut] if size > 1 else []
        riding = [len(step.num_new) for step in session.steps[num_steps:]]

        def proof(request_id: str) -> None:
            prove(set(sizes[:-1]) <= {size}, f"chunks were {sizes}")
            prove(riding.count(budget - size + 1) >= probe.num_prompt // size, "not all rode along")

        return settled(session, ids, NUM_TOKENS, proof)

    def suits(probe: Probe) -> bool:
        return size < probe.num_prompt <= MAX_SMALL_CHUNKS * size and probe.num_prompt < 60

    return shared(f"chunks of {size} beside {budget - size} riders", suits, run, size=1)
