"""The report of swaps under load says what was wrong, and the trials' who was not found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.service.client import Call
from bench.swap import command, swaps, trials
from bench.swap.swaps import Plan, Result, Windows
from bench.swap.traffic import Findings
from bench.swap.trials import Ending, Trial

PLAN = Plan(("a", "b"), (), {}, num_swaps=2, knee_s=1.0, quiet_s=1.0, seed=0)
METRICS = {
    "compile_events_total{serving}": 0.0,
    "compile_events_total{version}": 3.0,
    "memory_bytes{weights}": 4096.0,
    "process_resident_memory_bytes": 2.0**28,
}


def findings(gap_s: float, by_version: Counter[str]) -> Findings:
    gaps = [(float(i), gap_s) for i in range(100)]
    return Findings(num_sent=100, num_compared=100, by_version=by_version, gaps=gaps)


def result() -> Result:
    """Of a run in which all was well."""
    return Result(
        clients=4,
        rate=10.0,
        quiet=findings(0.010, Counter(a=100)),
        swapped=findings(0.012, Counter(a=50, b=50)),
        windows=Windows(loading=[(0.0, 40.0)], swapping=[(50.0, 60.0), (70.0, 80.0)]),
        seconds=90.0,
        step_s=0.005,
        before=METRICS,
        after=dict(METRICS),
    )


def failed(found: Result) -> list[str]:
    return [line for line, is_good in swaps.report(PLAN, found) if not is_good]


def test_a_run_in_which_all_was_well_meets_every_bar():
    assert failed(result()) == []


def test_a_reply_of_neither_version_misses_the_bar():
    found = result()
    found.swapped.different.append(Call("/", {}))
    assert len(failed(found)) == 1
    assert "1 of 100" in failed(found)[0]


def test_a_request_that_failed_misses_the_bar():
    found = result()
    found.swapped.errors["500 engine_failure"] += 1
    assert len(failed(found)) == 1


def test_a_run_that_only_one_version_answered_misses_the_bar():
    found = result()
    found.swapped.by_version = Counter(a=100)
    assert len(failed(found)) == 1


@pytest.mark.parametrize("name", ["compile_events_total{serving}", "memory_bytes{weights}"])
def test_what_is_compiled_or_left_in_memory_misses_the_bar(name: str):
    found = result()
    found.after = METRICS | {name: METRICS[name] + 1}
    assert len(failed(found)) == 1


def test_only_gaps_that_overlap_a_swap_count_against_it():
    found = result()
    found.swapped.gaps = [(45.0, 9.0), (65.0, 4.0), (100.0, 19.0)] * 40
    assert found.swapped.gaps_in(found.windows.swapping) == []
    found.swapped.gaps.append((71.0, 12.0))  # from 59 to 71
    assert found.swapped.gaps_in(found.windows.swapping) == [12.0]
    assert len(failed(found)) == 1


@pytest.mark.parametrize(
    ("is_bad", "phase", "is_good"),
    [
        (True, "rolled_back", True),
        (True, "failed", True),
        (True, "canary", False),
        (False, "canary", True),
        (False, "rolled_back", False),
    ],
)
def test_a_bad_canary_must_go_and_a_good_one_must_stay(is_bad: bool, phase: str, is_good: bool):
    ending = Ending(Trial("t", is_bad, Path("t")), phase, "", 9.0, 12)
    assert [good for _, good in trials.report([ending])] == [is_good]


def test_parts_that_are_not_known_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["--parts", "swaps,naps"])
    assert "expected some of swaps, trials, simulated" in capsys.readouterr().err


@pytest.mark.load
def test_swaps_under_load_of_a_tiny_model(capsys: pytest.CaptureFixture[str]):
    args = ["--parts", "swaps", "--swaps", "8", "--knee-s", "0.5", "--quiet-s", "3"]
    command.main(args)
    out = capsys.readouterr().out.splitlines()
    bad = [line for line in out if line.startswith("FAILED") and "p99" not in line]  # no timing
    assert bad == []
    assert any("8 swaps" in line for line in out)
