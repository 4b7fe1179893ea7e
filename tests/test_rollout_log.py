"""The log of decisions outlives crashes, damage and full disks, and never stops who serves."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.canary.facts import RequestFacts
from jaxinfer.rollout import Rollout, RolloutPlan, Stage
from jaxinfer.rollout_log import RolloutLog, last_state, record_of
from jaxinfer.scheduling.request import FinishReason

AT = "2026-01-02T03:04:05Z"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "rollouts.jsonl"


def rollout_of(plan: RolloutPlan | None = None) -> Rollout:
    return Rollout(plan or RolloutPlan((Stage(0.25),)), stable="v1", now=0.0)


def test_records_come_back_in_order_and_after_a_restart(path: Path):
    log = RolloutLog(path)
    assert log.append({"n": 1})
    assert log.append({"n": 2, "words": "größer"})
    assert RolloutLog(path).records() == [{"n": 1}, {"n": 2, "words": "größer"}]


def test_no_file_is_no_records(path: Path):
    assert RolloutLog(path).records() == []


def test_a_missing_folder_is_made(path: Path):
    assert not path.parent.exists()
    assert RolloutLog(path).append({"n": 1})


def test_a_line_that_a_crash_tore_is_left_out_and_the_next_is_not_lost(
    path: Path, caplog: pytest.LogCaptureFixture
):
    log = RolloutLog(path)
    log.append({"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "rea')
    assert log.records() == [{"n": 1}]
    assert "1 damaged lines" in caplog.text
    log.append({"n": 3})
    assert log.records() == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("junk", [b"\xff\xfe\x00", b"[1, 2]", b"7", b"[" * 5000, b"\x00" * 4096])
def test_what_is_no_record_is_left_out(path: Path, junk: bytes):
    path.parent.mkdir()
    path.write_bytes(b'{"n": 1}\n' + junk + b"\n\n" + b'{"n": 2}\n')
    assert RolloutLog(path).records() == [{"n": 1}, {"n": 2}]


def test_the_file_is_bounded_and_the_newest_stay(path: Path):
    log = RolloutLog(path, max_bytes=100)
    for n in range(100):
        assert log.append({"n": n})
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 200
    numbers = [record["n"] for record in log.records()]
    assert numbers == list(range(numbers[0], 100))
    assert len(numbers) >= 10


def test_each_record_is_on_the_disk_when_append_returns(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    RolloutLog(path).append({"n": 1})
    assert sizes[0] == path.stat().st_size


def test_a_full_disk_is_said_once_and_the_next_record_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = RolloutLog(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not log.append({"n": 1})
        assert not log.append({"n": 2})
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert log.append({"n": 3})
    assert log.records()[-1] == {"n": 3}


def test_a_folder_in_the_place_of_the_file_stops_nobody(
    path: Path, caplog: pytest.LogCaptureFixture
):
    path.mkdir(parents=True)
    log = RolloutLog(path)
    assert not log.append({"n": 1})
    assert log.records() == []
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes"])
def test_what_json_cannot_say_is_refused_and_leaves_no_torn_line(path: Path, value: object):
    log = RolloutLog(path)
    assert not log.append({"n": value})
    assert log.append({"n": 1})
    assert log.records() == [{"n": 1}]


def test_a_decision_is_written_with_all_its_numbers(path: Path):
    rollout = rollout_of()
    rollout.loaded("v2", 1.0)
    bad = RequestFacts("v2", FinishReason.ERROR, 0, 0.0, None, is_not_numbers=True)
    decision = rollout.note_request(bad, 2.0)
    assert decision
    log = RolloutLog(path)
    log.append(record_of(decision, rollout, at=AT))
    (record,) = log.records()
    assert record["numbers"] == decision.numbers
    assert (record["at"], record["kind"], record["by"]) == (AT, "roll_back", "signal")
    assert json.loads(path.read_text()) == record


def test_the_last_state_says_what_was_running():
    rollout = rollout_of()
    records: list[dict[str, Any]] = []

    def said() -> str | None:
        records.append(record_of(rollout.decisions[-1], rollout, at=AT))
        return last_state(records)

    assert last_state([]) is None
    assert said() == "stable v1, while a new version was loading"
    rollout.loaded("v2", 1.0)
    assert said() == "canary v2 at 25 % of stable v1"
    rollout.promote(2.0)
    assert said() == "v2, promoted over v1"
    rollout.roll_back(3.0, "odd")
    assert said() == "stable v1; v2 had been rolled back"


def test_the_last_state_of_a_version_that_could_not_be_loaded():
    rollout = rollout_of()
    decision = rollout.failed("no such file", 1.0)
    assert decision
    assert last_state([record_of(decision, rollout, at=AT)]) == (
        "stable v1; a new version could not be loaded"
    )


@pytest.mark.parametrize(
    "record", [{}, {"phase": "dancing", "stable": "v1"}, {"phase": ["loading"], "stable": 7}]
)
def test_records_of_another_make_have_no_state(record: dict[str, Any]):
    assert last_state([record]) is None


def test_other_records_after_it_do_not_hide_the_state():
    state = {"phase": "canary", "stable": "v1", "canary": "v2", "share": "?"}
    assert last_state([state, {"note": "standby dropped"}]) == (
        "canary v2 at an unknown share of stable v1"
    )
