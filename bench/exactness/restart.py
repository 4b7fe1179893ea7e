"""The same model built again from serialized programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.exactness.circumstance import (
    Circumstance,
    Lab,
    Outcomes,
    anyone,
    prove,
    settled,
    shared,
    submit,
)
from bench.exactness.probes import Probe

NUM_TOKENS = 8
NOTHING_COMPILED = " 0 compiled"


def restart() -> Iterator[Circumstance]:
    yield shared("after a restart", anyone, _restarted)


def _restarted(lab: Lab, group: Sequence[Probe]) -> Outcomes:
    subject, about = lab.subject.restarted()
    session = subject.session()
    ids = submit(session, group, NUM_TOKENS)
    session.drain()

    def proof(request_id: str) -> None:
        prove(about.endswith(NOTHING_COMPILED), f"its programs were {about}")

    return settled(session, ids, NUM_TOKENS, proof)
