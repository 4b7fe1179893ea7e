"""Cases counted by circumstance, and their lines."""

from __future__ import annotations

from functools import partial

import pytest

from bench.exactness.circumstance import Case
from bench.exactness.suite import circumstances
from bench.exactness.tally import Tally, row, tallies, total
from jaxinfer.scheduling.batch import Batch
from tests.bench.exactness.fake_subject import PROBES, Erring, fake_lab, in_company
from tests.bench.stopwatch import Stopwatch

EXACT = Case("warm", "one", None)
OTHER = Case("warm", "two", "token 3 is 5, not 6")
NOT_MET = Case("warm", "three", "not brought about: 0 cached tokens", is_proved=False)


def of(*cases: Case) -> Tally:
    tally = Tally("warm")
    for case in cases:
        tally.add(case, 0.5)
    return tally


def test_cases_are_counted():
    tally = of(EXACT, OTHER, NOT_MET, EXACT)
    assert (tally.num_cases, tally.num_differences, tally.num_not_met) == (4, 1, 1)
    assert tally.wall_s == 2.0


def test_what_is_wrong_stands_below_the_figures():
    first, *wrong = of(EXACT, OTHER, NOT_MET).rows()
    assert first.split() == ["warm", "3", "1", "1", "1.5"]
    assert [line.strip() for line in wrong] == [str(OTHER), str(NOT_MET)]
    assert "'two' in circumstance 'warm': token 3 is 5, not 6" in wrong[0]


def test_a_line_of_json_holds_all_of_it():
    line = of(OTHER).line({"model": "m"})
    assert line == {
        "measure": "exactness",
        "circumstance": "warm",
        "num_cases": 1,
        "num_differences": 1,
        "num_not_met": 0,
        "wall_s": 0.5,
        "wrong": [str(OTHER)],
        "model": "m",
    }


def test_the_total_is_the_sum():
    whole = total([of(EXACT, OTHER), of(NOT_MET), of()])
    assert (whole.num_cases, whole.num_differences, whole.num_not_met) == (3, 1, 1)
    assert len(list(whole.rows())) == 1


def test_a_row_of_the_table_has_at_most_100_columns():
    for circumstance in circumstances(fake_lab().limits, PROBES):
        assert len(row(circumstance.name, (12, 0, 0, "123.4"))) <= 100
        assert row(circumstance.name, (7,)).split()[-1] == "7"


def test_families_are_one_line_each():
    lab = fake_lab()
    found = list(tallies(lab, circumstances(lab.limits, PROBES), Stopwatch()))
    names = [tally.circumstance for tally in found]
    assert names[0] == "alone: the reference"
    assert len(set(names)) == len(names)
    counts = {tally.circumstance: tally.num_cases for tally in found}
    assert counts["every row of 16"] == 16 * counts["every row of 8"] // 8
    assert counts["a hit at a page boundary"] == 1 + 1 + 4 + 2 + 6
    assert counts["cold"] == len(PROBES)
    assert total(found).num_differences == total(found).num_not_met == 0


@pytest.mark.parametrize("least", [2, 9])
def test_an_inexact_runner_is_in_the_total(least: int):
    def fault(batch: Batch, row: int) -> bool:
        return in_company(batch, row) and batch.num_seqs >= least

    lab = fake_lab(partial(Erring, fault=fault))
    counts = {
        tally.circumstance: tally.num_differences
        for tally in tallies(lab, circumstances(lab.limits, PROBES), Stopwatch())
    }
    assert counts["15 neighbours"] == len(PROBES)
    assert (counts["7 neighbours"] > 0) == (least == 2)
    assert counts["cold"] == counts["chunks of 16"] == 0
