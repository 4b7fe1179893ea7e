"""Tests of what bench.host measures and shows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from bench.host import command as host
from bench.host.costs import HostWorld, StepCosts, digest_s_per_token, percentiles
from tests.tiny_tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())


def ticks() -> Iterator[float]:
    """A clock on which every look takes a second."""
    return itertools.count(0.0, 1.0)


def world(num_output: tuple[int, int] = (3000, 3001)) -> HostWorld:
    clock = ticks()
    return HostWorld(
        TOKENIZER,
        num_running=9,
        num_waiting=20,
        num_output=num_output,
        clock=lambda: next(clock),
    )


def test_parts_of_a_step_add_up_and_the_runner_is_not_among_them():
    """Looks at the clock: one second each for schedule, update and the runner, and between them."""
    costs = world().steps(3)
    for cost in costs:
        assert (cost.schedule_s, cost.update_s) == (1.0, 1.0)
        assert cost.all_s == cost.schedule_s + cost.update_s + cost.detokenize_s
        assert cost.num_rows == 9
        assert cost.kinds == ["decode"]


def test_the_queue_stays_as_long_as_it_was_asked_to_be():
    churn = world(num_output=(3, 9))
    costs = churn.steps(40)
    stats = churn.engine.pool_stats()
    assert stats.num_waiting == 20
    assert stats.num_running >= 5
    assert "prefill" in [kind for cost in costs for kind in cost.kinds]


def test_a_digest_is_counted_per_token():
    clock = ticks()
    assert digest_s_per_token(640, lambda: next(clock)) == 1 / 640


def test_percentiles_of_a_hundred_and_one():
    assert percentiles(range(101)) == {"p50": 50, "p90": 90, "p99": 99, "max": 100}


def test_a_table_names_every_part_in_microseconds():
    costs = [
        StepCosts(1e-6, 2e-6, 3e-6, ["decode"], 7),
        StepCosts(1e-6, 2e-6, 3e-6, ["prefill"], 9),
    ]
    result = {"measure": "churn", **host._parts(costs), **host._shares(costs)}
    lines = list(host.table(result))
    assert "8 rows, 50% of the steps with chunks" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == ["1.0", "2.0", "3.0", "6.0"]


@pytest.mark.parametrize("argv", [["--running", "0"], ["--steps", "x"], ["--unknown"]])
def test_a_bad_command_line_is_refused(argv):
    with pytest.raises(SystemExit) as info:
        host.parse(argv)
    assert info.value.code == 2


def test_json_lines_hold_every_measure(monkeypatch, capsys):
    monkeypatch.setattr(host, "_tokenizer", lambda model: TOKENIZER)
    assert host.main(["--running", "4", "--waiting", "5", "--steps", "5", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["measure"] for line in lines] == ["steady", "churn", "digest"]
    assert all(line["num_running"] == 4 for line in lines)
    assert lines[0]["all_s"]["p50"] > 0


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(capsys):
    assert host.main(["--model", "/nowhere/at/all"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
