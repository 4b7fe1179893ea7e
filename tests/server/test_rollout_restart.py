"""What the next process knows of a rollout that the last one did not end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.rollout_log import RolloutLog
from jaxinfer.server.decision_book import before_this_start
from tests.server.rollout_world import World, run, until
from tests.server.test_lifecycle import ROOT, serving


def record(phase: str, share: float = 0.0) -> dict[str, Any]:
    return {"kind": "x", "phase": phase, "stable": "v1", "canary": "v2", "share": share}


@pytest.mark.parametrize(
    ("phase", "serves", "told"),
    [
        ("loading", "v1", "stable v1, while v2 was loading"),
        ("canary", "v1", "canary v2 at 25 % of stable v1"),
        ("promoted", "v1", "v2, promoted over v1"),
        ("promoted", "v2", None),
        ("rolled_back", "v1", None),
        ("rolled_back", "v2", "stable v1; v2 had been rolled back"),
        ("failed", "v1", None),
        ("started", "v1", None),
    ],
)
def test_a_start_says_what_the_last_process_left_half_done(phase: str, serves: str, told):
    end = {"kind": "end", "version": "v1"}
    assert before_this_start([record("canary"), record(phase, 0.25)], serves) == told
    assert before_this_start([record(phase, 0.25), end], serves) == told
    assert before_this_start([], serves) is None


def test_after_a_start_the_process_before_is_told_of_no_more(tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(record("canary", 0.25)) + "\n")

    async def scenario(w: World) -> None:
        assert w.rollouts.status()["before_this_start"] == "so it was"
        await until(lambda: len(w.records()) == 2)
        assert before_this_start(w.records(), "v1") is None

    run(scenario, tmp_path, before="so it was")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "told"),
    [
        ("loading", "stable v1, while v2 was loading"),
        ("canary", "canary v2 at 50 % of stable v1"),
        ("promoted", "v2, promoted over v1"),
    ],
)
def test_a_process_that_is_killed_leaves_word(tmp_path: Path, phase: str, told: str):
    path = tmp_path / "rollouts.jsonl"
    command = [sys.executable, "-m", "tests.server.rolling_letters", phase, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
        process.kill()
    assert before_this_start(RolloutLog(path).records(), "v1") == told


@pytest.mark.slow
def test_a_server_warns_of_what_was_under_way(tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(record("canary", 0.25)) + "\n" + '{"kind": "torn')
    with serving(0.0, "ok", "--rollout-log", str(path)) as process:
        process.wait_for("READY ")
        told = "before this start: canary v2 at 25 % of stable v1; it is v1 that serves now"
        assert any(told in line for line in process.lines)
    assert RolloutLog(path).records()[-1]["kind"] == "start"
