"""The soak and the overload of bench/, scaled down: `pytest -m load`.

No time is a bar here, and no slope of memory, which a short run does not show.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import bench.overload
import bench.soak
from bench.service.faults import FaultRates
from bench.service.server import started
from bench.tiny_model import write_checkpoint


@pytest.mark.load
@pytest.mark.timeout(600)
def test_failing_steps_and_leaving_clients_change_no_reply_and_leak_nothing(tmp_path: Path):
    model = str(write_checkpoint(tmp_path / "tiny"))
    flags = (*bench.soak.TINY_FLAGS, *bench.soak.POOL, "--cache-dir", str(tmp_path / "cache"))
    rates = FaultRates(at_dispatch=0.005, at_collect=0.005, pool_lost=0.001)
    plan = bench.soak.Plan(2000, 24, 0.3, 0.05, rates, seed=0)
    lines = list(bench.soak.report(plan, bench.soak.soak(model, flags, plan)))
    assert [line for line, is_good in lines if not is_good and "slope" not in line] == []


@pytest.mark.load
@pytest.mark.timeout(600)
def test_at_four_times_its_capacity_a_server_answers_as_much_and_nobody_late(default_model: Path):
    plan = bench.overload.Plan((4.0,), 40.0, 32, 12, 16, timeout_s=15.0, seed=0)
    with started(str(default_model), bench.overload.LATENCY_FLAGS) as server:
        _, outcomes = asyncio.run(bench.overload.measure(plan, server))
    closed, overloaded = (outcome.level for outcome in outcomes)
    assert overloaded.refusals()
    assert overloaded.goodput >= 0.8 * closed.goodput
    assert overloaded.late_share() <= 0.01
    assert overloaded.first_tokens("interactive")
