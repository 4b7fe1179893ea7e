"""What a circumstance is, and the laboratory that brings a request into it and compares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from bench.exactness.probes import Probe
from bench.exactness.session import Session
from bench.exactness.subject import Limits, Subject
from bench.exactness.trace import Trace, difference

T = TypeVar("T")


class NotProved(Exception):
    """The circumstance did not come about, so nothing was tested."""


def prove(is_true: bool, otherwise: str) -> None:
    """Raises: NotProved with `otherwise`, what was seen in place of the circumstance."""
    if not is_true:
        raise NotProved(otherwise)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a probe gave in a circumstance that was proved."""

    got: tuple[Trace, ...]  # of one or more copies or choices
    num_tokens: int  # that were asked for
    want: tuple[Trace, ...] | None = None  # for each of `got`; None: the reference
    places: tuple[int, ...] | None = None  # of the tokens drawn in the circumstance; None: all


@dataclass(frozen=True, slots=True)
class Circumstance:
    """One way to run a request that must not change a bit of it.

    happen: runs the probe in the circumstance. Raises NotProved if that did not come about.
    """

    name: str
    suits: Callable[[Probe], bool]
    happen: Callable[[Lab, Probe], Outcome] = field(repr=False)
    family: str = ""  # of circumstances that are one line of a table; "": its name


@dataclass(frozen=True, slots=True)
class Case:
    """One request in one circumstance: exact if nothing is `wrong`."""

    circumstance: str
    probe: str
    wrong: str | None
    is_proved: bool = True  # False: the circumstance did not come about, which is wrong, too

    def __str__(self) -> str:
        return f"{self.probe!r} in circumstance {self.circumstance!r}: {self.wrong or 'exact'}"


class Lab:
    """A subject and the requests that are put to it. Remembers references and shared runs."""

    def __init__(self, subject: Subject, probes: Sequence[Probe]):
        seeds = {probe.request.sampling.seed for probe in probes}
        assert len(seeds) == len(probes), "rows are told apart by their seeds"
        self.subject = subject
        self.probes = tuple(probes)
        self._memory: dict[Hashable, object] = {}

    @property
    def limits(self) -> Limits:
        return self.subject.limits

    def rng(self, *seed: int) -> np.random.Generator:
        return np.random.default_rng(seed)

    def once(self, key: Hashable, run: Callable[[], T]) -> T:
        """What `run` gave when it was first asked for under this key."""
        if key not in self._memory:
            self._memory[key] = run()
        return self._memory[key]  # type: ignore[return-value]

    def reference(self, probe: Probe) -> Trace:
        """Alone, without a prefix index, in the largest chunks, on the pages in their order."""

        def alone() -> Trace:
            session = self.subject.session(cache=False)
            request_id = session.submit(probe.request)
            session.drain()
            return session.trace(request_id)

        return self.once(("reference", probe.name), alone)

    def check(self, circumstance: Circumstance, probe: Probe) -> Case:
        """Brings the probe into the circumstance and compares."""
        reference = self.reference(probe)
        try:
            outcome = circumstance.happen(self, probe)
        except NotProved as error:
            return Case(circumstance.name, probe.name, f"not brought about: {error}", False)
        wrong = None
        for i, got in enumerate(outcome.got):
            want = reference if outcome.want is None else outcome.want[i]
            wrong = wrong or difference(got, want.first(outcome.num_tokens), outcome.places)
        return Case(circumstance.name, probe.name, wrong)


Outcomes = dict[str, Outcome | NotProved]
"""What a run that several probes share gave, by the probe's name."""

Run = Callable[[Lab, Sequence[Probe]], Outcomes]
"""Brings about a circumstance for these probes together."""


def shared(
    name: str,
    suits: Callable[[Probe], bool],
    run: Run,
    *,
    size: int = 1 << 30,
    family: str = "",
) -> Circumstance:
    """A circumstance that is brought about once for all probes that suit it, or for each `size`."""

    def run_all(lab: Lab) -> Outcomes:
        probes = [p for p in lab.probes if suits(p)]
        outcomes: Outcomes = {}
        for start in range(0, len(probes), size):
            outcomes |= run(lab, probes[start : start + size])
        return outcomes

    def happen(lab: Lab, probe: Probe) -> Outcome:
        outcome = lab.once(name, lambda: run_all(lab))[probe.name]
        if isinstance(outcome, NotProved):
            raise outcome
        return outcome

    return Circumstance(name, suits, happen, family)


def submit(session: Session, probes: Iterable[Probe], num_tokens: int) -> dict[str, str]:
    """Returns: probe's name -> request."""
    return {p.name: session.submit(p.request, max_tokens=num_tokens) for p in probes}


def settled(
    session: Session,
    ids: Mapping[str, str],
    num_tokens: int,
    proof: Callable[[str], None] = lambda request_id: None,
) -> Outcomes:
    """Outcomes of a session that has ended.

    Args:
        ids: as `submit` gave them.
        proof: given a request; raises NotProved.
    """
    outcomes: Outcomes = {}
    for name, request_id in ids.items():
        try:
            proof(request_id)
        except NotProved as error:
            outcomes[name] = error
        else:
            outcomes[name] = Outcome((session.trace(request_id),), num_tokens)
    return outcomes


def anyone(probe: Probe) -> bool:
    return True


def lasting(probe: Probe) -> bool:
    return not probe.may_end_early
