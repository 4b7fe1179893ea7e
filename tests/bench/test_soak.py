from __future__ import annotations

from collections import Counter

import pytest

from bench.service.client import Call
from bench.service.faults import FaultRates
from bench.soak import LEFT_OVER, Findings, Plan, report

PLAN = Plan(300, 8, 0.3, 0.05, FaultRates(at_collect=0.01), 0)
MIB = 2.0**20


def findings() -> Findings:
    """Of a run in which all was well."""
    found = Findings(
        seconds=9.0,
        endings=Counter(done=200, left=85, bad=15),
        num_compared=200,
        sent=list(range(0, 300, 10)),
        rss=[100 * MIB] * 30,
    )
    found.last = dict.fromkeys(LEFT_OVER.values(), 0.0)
    found.last |= {
        "request_retries_total": 12.0,
        "engine_rebuilds_total": 1.0,
        "num_preemptions_total": 3.0,
    }
    return found


def failed(found: Findings) -> list[str]:
    return [line for line, is_good in report(PLAN, found) if not is_good]


def test_a_run_without_faults_meets_every_bar():
    assert not failed(findings())


@pytest.mark.parametrize("name", LEFT_OVER.values())
def test_what_is_left_over_misses_the_bar(name: str):
    found = findings()
    found.last[name] = 1.0
    assert len(failed(found)) == 1


def test_a_reply_that_is_other_than_alone_misses_the_bar():
    found = findings()
    found.different.append(Call("/", {}))
    assert failed(found) == ["replies other than alone: 1 of 200"]


def test_a_run_in_which_nothing_was_compared_misses_the_bar():
    found = findings()
    found.num_compared = 0
    assert failed(found) == ["replies other than alone: 0 of 0"]


def test_a_run_in_which_no_step_failed_misses_the_bar():
    found = findings()
    found.last["request_retries_total"] = 0.0
    assert len(failed(found)) == 1


def test_memory_that_rises_with_the_requests_misses_the_bar():
    found = findings()
    found.rss = [100 * MIB + 1024.0 * n for n in found.sent]
    assert "slope 1,024 bytes per request" in failed(found)[0]


def test_memory_that_settles_after_a_while_does_not():
    found = findings()
    found.rss = [min(100 * MIB, 50 * MIB + i * 10 * MIB) for i in range(30)]
    assert not failed(found)


def test_good_requests_without_an_answer_miss_the_bar():
    found = findings()
    found.errors["500 engine_failure"] += 1
    assert failed(found) == ["good requests without an answer: {'500 engine_failure': 1}"]
