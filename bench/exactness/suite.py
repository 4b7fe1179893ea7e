"""All circumstances that a model's limits allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.exactness.chunks import chunks
from bench.exactness.circumstance import Circumstance
from bench.exactness.company import company
from bench.exactness.pages import pages
from bench.exactness.places import places
from bench.exactness.preemption import preemption
from bench.exactness.probes import Probe
from bench.exactness.restart import restart
from bench.exactness.subject import Limits
from bench.exactness.versions import versions


def circumstances(limits: Limits, probes: Sequence[Probe]) -> list[Circumstance]:
    """In the order of the table; their names differ."""
    longest = max(probe.num_prompt for probe in probes)
    return [
        *company(limits),
        *places(limits),
        *chunks(limits),
        *pages(limits, longest),
        *preemption(limits),
        *versions(limits),
        *restart(),
    ]


def cases(
    all_of: Sequence[Circumstance], probes: Sequence[Probe]
) -> Iterator[tuple[Circumstance, Probe]]:
    """Every probe in every circumstance that suits it."""
    for circumstance in all_of:
        for probe in probes:
            if circumstance.suits(probe):
                yield circumstance, probe
