from __future__ import annotations

from typing import Any

import pytest

from bench.overload import Level, Outcome, Plan, Sent, table
from bench.service.client import Reply

STEP = {"inter_token_latency_seconds_sum": 0.0, "inter_token_latency_seconds_count": 0.0}


def sent(at_s: float, name: str = "normal", *, e2e_s: float = 1.0, **reply: Any) -> Sent:
    fields: dict[str, Any] = {"ending": "done", "status": 200, "ttft_s": 0.1}
    return Sent(at_s, name, 2.0, Reply(**(fields | reply), e2e_s=e2e_s))


def refused(at_s: float, e2e_s: float = 0.005) -> Sent:
    return sent(at_s, ending="refused", status=429, error="overloaded", ttft_s=None, e2e_s=e2e_s)


def level(rate: float, per_second: int, *more: Sent) -> Level:
    """16 s, with so many good answers in each of them."""
    good = [sent(float(second)) for second in range(15) for _ in range(per_second)]
    return Level(rate, 16.0, [*good, *(sent(t, "interactive") for t in (5.0, 6.0)), *more])


def outcome(level: Level) -> Outcome:
    after = {"inter_token_latency_seconds_sum": 3.0, "inter_token_latency_seconds_count": 60.0}
    return Outcome(level, STEP, after, 0.3)  # a step takes 50 ms


def missed(*levels: Level) -> list[str]:
    """Of a server whose first token takes 0.1 s when it is idle; bar: 170 ms."""
    outcomes = [outcome(each) for each in (level(0.0, 4), *levels)]
    return [line for line, is_good in table([0.1] * 5, outcomes) if not is_good]


def test_goodput_counts_answers_in_time_after_the_ramp():
    late = sent(8.0, e2e_s=2.5)
    assert level(0.0, 3, late).goodput == pytest.approx((3 * 12 + 2) / 12)


def test_a_server_that_keeps_its_pace_meets_every_bar():
    assert not missed(level(4.0, 4, *[refused(t) for t in range(10)]))


def test_goodput_that_falls_misses_the_bar():
    (line,) = missed(level(16.0, 3, *[refused(t) for t in range(10)]))
    assert line.split()[:1] == ["4x"] or "4x" in line


def test_slow_refusals_miss_the_bar():
    assert len(missed(level(16.0, 4, *[refused(t, 0.02) for t in range(10)]))) == 1


def test_admitted_requests_that_are_late_miss_the_bar():
    timed_out = sent(7.0, ending="failed", status=504, error="deadline_exceeded")
    assert len(missed(level(16.0, 4, timed_out, timed_out))) == 1


def test_a_slow_first_token_of_the_highest_class_misses_the_bar():
    slow = [sent(t, "interactive", ttft_s=0.2) for t in (7.0, 8.0, 9.0)]
    assert len(missed(level(16.0, 4, *slow))) == 1


def test_a_plan_gives_each_class_its_deadline():
    plan = Plan((1.0,), 1.0, 1, 1, 1, 10.0, 0)
    assert [plan.timeout_of(n) for n in ("interactive", "normal", "batch")] == [10.0, 10.0, 20.0]
