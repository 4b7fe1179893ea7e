"""The suite finds nothing wrong with an exact runner, and what is wrong with each inexact one.

Runs every circumstance on a runner without JAX (tests/fakes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from bench.exactness.circumstance import Circumstance, Lab
from bench.exactness.probes import Probe
from bench.exactness.suite import cases, circumstances
from jaxinfer.scheduling.batch import Batch
from tests.bench.exactness.fake_subject import (
    PROBES,
    Erring,
    Fault,
    StalePage,
    after_a_chunk,
    fake_lab,
    in_company,
    num_new,
    out_of_order,
    riding,
)

ALL = circumstances(fake_lab().limits, PROBES)
BY_NAME = {circumstance.name: circumstance for circumstance in ALL}


def by_name(circumstance: Circumstance) -> str:
    return circumstance.name


def probes_of(circumstance: Circumstance) -> list[Probe]:
    return [probe for probe in PROBES if circumstance.suits(probe)]


def wrong(lab: Lab, name: str) -> Iterator[str | None]:
    """What is wrong with each probe in the circumstance of that name."""
    for probe in probes_of(BY_NAME[name]):
        yield lab.check(BY_NAME[name], probe).wrong


@pytest.fixture(scope="module")
def exact() -> Lab:
    return fake_lab()


class Switch:
    """A fault of every row, from the moment that it is switched on."""

    is_on = False

    def __call__(self, batch: Batch, row: int) -> bool:
        return self.is_on


def test_names_differ():
    assert len(BY_NAME) == len(ALL)


@pytest.mark.parametrize("circumstance", ALL, ids=by_name)
def test_an_exact_runner_is_exact_in_every_circumstance(exact: Lab, circumstance: Circumstance):
    assert probes_of(circumstance), "no probe suits it"
    for probe in probes_of(circumstance):
        case = exact.check(circumstance, probe)
        assert case.wrong is None, str(case)


@pytest.fixture(scope="module")
def erring() -> Lab:
    """Errs in everything but the references."""
    switch = Switch()
    lab = fake_lab(partial(Erring, fault=switch))
    for probe in PROBES:
        lab.reference(probe)
    switch.is_on = True
    return lab


@pytest.mark.parametrize("circumstance", ALL, ids=by_name)
def test_an_error_in_the_last_bit_is_reported_in_every_circumstance(
    erring: Lab, circumstance: Circumstance
):
    for probe in probes_of(circumstance):
        case = erring.check(circumstance, probe)
        assert case.wrong is not None
        assert case.wrong.startswith("logprob of token"), str(case)


def again(batch: Batch, row: int) -> bool:
    """Several tokens that do not end at the end of a prompt: some of them are of an answer."""
    num_tokens = int(batch.sampling.positions[row])
    return num_new(batch, row) > 1 and num_tokens not in {p.num_prompt for p in PROBES}


FAULTS: dict[str, tuple[Fault, list[str]]] = {
    "more than one sequence": (
        in_company,
        [
            "1 neighbour",
            "7 neighbours",
            "15 neighbours",
            "neighbours come and go",
            "a neighbour is aborted",
            "rides along in a prefill step",
            "beside itself",
            "beside its own seed",
            "first of several choices",
            "preempted once",
        ],
    ),
    "more than eight sequences": (
        lambda batch, row: batch.num_seqs > 8,
        ["15 neighbours", "neighbours come and go"],
    ),
    "a prompt in several pieces": (
        after_a_chunk,
        [
            "chunks of 16",
            "chunks of 24",
            "chunks of 3 beside 13 riders",
            "chunks of 8 beside 8 riders",
            "a hit on 1 page",
            "warm: a hit at full length",
            "a hit on its own answer",
            "after its last pages were evicted",
        ],
    ),
    "the largest bucket of decode": (
        lambda batch, row: batch.kind == "decode" and batch.bucket == 16,
        ["neighbours come and go", "row 0 of 16", "row 15 of 16"],
    ),
    "one token in a prefill step": (
        lambda batch, row: riding(batch, row) and batch.num_seqs > 1,
        ["rides along in a prefill step", "a neighbour is aborted"],
    ),
    "other pages": (
        out_of_order,
        ["pages in another order", "after its pages were evicted", "preempted twice"],
    ),
    "a prompt that is computed again": (
        again,
        ["preempted once", "preempted twice", "preempted twice, without a prefix index"],
    ),
}
"""What is wrong, and some of the circumstances that must find it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_where_it_shows(fault: str):
    is_wrong, names = FAULTS[fault]
    lab = fake_lab(partial(Erring, fault=is_wrong))
    for name in names:
        found = list(wrong(lab, name))
        assert any(found), f"{name} does not see it"
        assert not any("not brought about" in (text or "") for text in found), found


@pytest.mark.parametrize(("bucket", "bad_row"), [(8, 0), (8, 5), (16, 0), (16, 9), (16, 15)])
def test_a_fault_of_one_row_is_reported_for_that_row_alone(bucket: int, bad_row: int):
    def is_wrong(batch: Batch, row: int) -> bool:
        return (batch.kind, batch.bucket, row) == ("decode", bucket, bad_row)

    lab = fake_lab(partial(Erring, fault=is_wrong))
    lab_probes = probes_of(BY_NAME["row 0 of 8"])
    for probe in lab_probes:
        lab.once(("reference", probe.name), partial(fake_lab().reference, probe))
    for row in range(bucket):
        found = [text is not None for text in wrong(lab, f"row {row} of {bucket}")]
        assert found == [row == bad_row] * len(lab_probes), f"row {row}"


def test_a_stale_page_is_reported_by_every_hit():
    lab = fake_lab(StalePage)
    for probe in PROBES:
        lab.once(("reference", probe.name), partial(fake_lab().reference, probe))
    names = [name for name in BY_NAME if "a hit" in name]
    assert len(names) >= 6
    unseen = [name for name in names for text in wrong(lab, name) if text is None]
    assert len(unseen) <= 1, unseen  # another of the fake's 101 tokens may be the same by chance


def test_cases_are_every_probe_in_every_circumstance_that_suits_it():
    pairs = [(c.name, p.name) for c, p in cases(ALL, PROBES)]
    assert len(set(pairs)) == len(pairs)
    assert {name for name, _ in pairs} == set(BY_NAME)
    assert ("chunks of 16", "2 tokens, greedy") not in pairs
    assert ("chunks of 16", "17 tokens, drawn") in pairs
