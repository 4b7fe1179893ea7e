"""The --shadow file: what is in it, how large it gets, who may read it, and how it goes wrong."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.canary.facts import ShadowFacts
from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.shadow_file import MAX_UNWRITTEN, ShadowFile
from jaxinfer.server.shadow_record import ShadowOutput, ShadowRecord, fields_of
from jaxinfer.server.shadow_summary import NUM_LARGEST, summary

MIB = 2**20
RECORD = ShadowRecord(
    time_s=1000.5,
    stable="v1",
    canary="v2",
    answered_by="v1",
    prompt="Grüße,\n\ud800 wie?",
    sampling={"temperature": 0.0},
    is_same_draw=True,
    stable_output=ShadowOutput("bcd", 3, FinishReason.LENGTH),
    canary_output=ShadowOutput("bcx", 3, FinishReason.STOP),
    first_difference=2,
    edit_distance=1 / 3,
    facts=ShadowFacts(num_tokens=10, kl=0.25, nll_increase=0.5),
)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "shadow.jsonl"
    left = [thread.name for thread in threading.enumerate() if thread.name == "shadow-file"]
    assert not left


def written(path: Path, *records: ShadowRecord, max_bytes: int = MIB) -> ShadowFile:
    file = ShadowFile(path, max_bytes)
    for record in records:
        file.write(record)
    file.close()
    return file


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def numbered(number: int, **changes: object) -> ShadowRecord:
    return replace(RECORD, time_s=float(number), **changes)  # type: ignore[arg-type]


def test_a_line_is_json_and_comes_back(path: Path):
    record = replace(RECORD, prompt="Grüße,\nwie?")
    assert written(path, record, replace(record, facts=None)).num_written == 2
    first, second = lines_of(path)
    fields = json.loads(first)
    assert fields["prompt"] == "Grüße,\nwie?"
    assert fields["stable_output"] == {"text": "bcd", "num_tokens": 3, "finish": "length"}
    assert fields["facts"] == {"num_tokens": 10, "kl": 0.25, "nll_increase": 0.5}
    assert ShadowRecord.of(first) == record
    assert ShadowRecord.of(second).facts is None


def test_a_text_that_no_encoding_has_is_written_all_the_same(path: Path):
    written(path, RECORD)
    assert ShadowRecord.of(path.read_bytes()).prompt == "Grüße,\n? wie?"


def test_only_the_fields_of_sampling_that_were_chosen_are_shown():
    sampling = SamplingParams(temperature=0.5, seed=7, stop=("x",), guided={"regex": "a+"})
    assert json.loads(json.dumps(fields_of(sampling))) == {
        "temperature": 0.5,
        "seed": 7,
        "stop": ["x"],
        "guided": {"kind": "regex", "text": "a+"},
    }


def test_only_the_owner_may_read_it_even_where_it_was_open_to_all(path: Path):
    path.touch(0o644)
    path.chmod(0o644)
    file = written(path, RECORD, RECORD, max_bytes=int(2.5 * len(RECORD.line())))
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, file.older)] == [0o600, 0o600]


def test_the_older_half_goes_away(path: Path):
    """Four lines fit into each half."""
    size = len(numbered(10).line())
    max_bytes = 2 * (4 * size + size // 2)
    for last in (14, 15, 19, 23):
        for number in range(10, last):
            written(path, numbered(number), max_bytes=max_bytes)
        older = path.with_name("shadow.jsonl.1")
        parts = [p for p in (older, path) if p.exists()]
        assert sum(p.stat().st_size for p in parts) <= max_bytes
        times = [ShadowRecord.of(line).time_s for p in parts for line in lines_of(p)]
        assert times == list(range(int(times[0]), last))
        assert len(times) >= min(last - 10, 4)
        for part in parts:
            part.unlink()


def test_a_record_that_is_larger_than_half_is_dropped(path: Path):
    file = written(path, RECORD, replace(RECORD, prompt="x" * 3000), RECORD, max_bytes=4000)
    assert (file.num_written, file.num_dropped) == (2, 1)
    assert len(lines_of(path)) == 2


def test_a_second_run_goes_on_behind_a_torn_line(path: Path):
    path.write_bytes(RECORD.line() + RECORD.line()[:50])
    written(path, RECORD)
    assert len(lines_of(path)) == 3
    found = summary(path)
    assert (found.num_records, found.num_unreadable) == (2, 1)


def test_a_first_line_that_was_torn_at_once_is_ours_too(path: Path):
    path.write_bytes(RECORD.line()[:4])
    assert written(path, RECORD).num_written == 1


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "other", "missing", "device"])
def test_what_is_no_file_of_ours_is_left_alone(
    path: Path, kind: str, caplog: pytest.LogCaptureFixture
):
    """One warning, and no more is written."""
    other = path.with_name("other")
    other.write_text("precious\n")
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "other":
        path = other
    elif kind == "missing":
        path = path / "not" / "there"
    else:
        path = Path("/dev/null")
    mode = other.stat().st_mode
    with caplog.at_level(logging.WARNING):
        file = written(path, RECORD, RECORD)
    assert not file.is_on
    assert file.num_written == 0
    (said,) = caplog.messages
    assert said.startswith(f"--shadow {path}: ")
    assert "nothing more is written" in said
    assert other.read_text() == "precious\n"
    assert other.stat().st_mode == mode


def test_a_full_disk_ends_it_with_one_warning_and_no_torn_line(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    written(path, RECORD)
    write = os.write

    def half(file: int, data: memoryview) -> int:
        if len(data) < len(RECORD.line()):
            raise OSError(28, "No space left on device")
        return write(file, data[:20])

    monkeypatch.setattr("jaxinfer.server.shadow_file.os.write", half)
    with caplog.at_level(logging.WARNING):
        file = written(path, RECORD, RECORD, RECORD)
    monkeypatch.undo()
    assert [ShadowRecord.of(line).time_s for line in lines_of(path)] == [1000.5]
    assert not file.is_on
    assert caplog.messages == [
        f"--shadow {path}: [Errno 28] No space left on device; nothing more is written to it"
    ]


def test_a_disk_that_hangs_blocks_nobody(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Records wait, up to a bound; the others are dropped."""
    gate, is_stuck = threading.Event(), threading.Event()
    write = os.write

    def slow(file: int, data: memoryview) -> int:
        is_stuck.set()
        gate.wait(5)
        return write(file, data)

    monkeypatch.setattr("jaxinfer.server.shadow_file.os.write", slow)
    file = ShadowFile(path, MIB)
    file.write(RECORD)
    assert is_stuck.wait(5)
    for _ in range(MAX_UNWRITTEN + 5):
        file.write(RECORD)
    assert file.num_dropped == 5
    gate.set()
    file.close()
    assert file.num_written == len(lines_of(path)) == MAX_UNWRITTEN + 1


def test_a_closed_file_drops_what_comes(path: Path):
    file = written(path, RECORD)
    file.write(RECORD)
    assert (file.num_written, file.num_dropped) == (1, 1)


def test_a_summary_counts_and_means_and_shows_the_largest(path: Path):
    near = ShadowFacts(num_tokens=30, kl=0.05, nll_increase=-0.1)
    same = replace(RECORD, canary_output=RECORD.stable_output, first_difference=None)
    records = [
        numbered(0),
        replace(same, time_s=1.0, edit_distance=0.0, facts=near),
        numbered(2, facts=None, is_same_draw=False, edit_distance=1.0),
        numbered(3, facts=None, canary="v3", edit_distance=0.5),
    ]
    written(path, *records)
    found = summary(path)
    assert (found.num_records, found.num_unreadable, found.num_same_draw) == (4, 0, 3)
    assert found.num_same == 1
    assert found.pairs == {"v1 -> v2": 3, "v1 -> v3": 1}
    assert found.stable_finishes == {"length": 4}
    assert found.canary_finishes == {"stop": 3, "length": 1}
    assert found.mean_edit_distance == pytest.approx((1 / 3 + 0 + 0.5) / 3)
    assert found.num_compared_tokens == 40
    assert found.mean_kl == pytest.approx((10 * 0.25 + 30 * 0.05) / 40)
    assert found.mean_nll_increase == pytest.approx((10 * 0.5 - 30 * 0.1) / 40)
    assert [record.time_s for record in found.largest] == [0, 1, 2, 3]
    assert summary(path, canary="v3").pairs == {"v1 -> v3": 1}


def test_a_summary_reads_both_halves_and_keeps_ten(path: Path):
    size = len(numbered(10).line())
    records = [
        numbered(10 + i, facts=ShadowFacts(num_tokens=10, kl=i / 10, nll_increase=0.0))
        for i in range(16)
    ]
    file = written(path, *records, max_bytes=2 * 12 * size)
    assert file.older.exists()
    found = summary(path)
    assert found.num_records == 16
    assert [record.time_s for record in found.largest] == [25.0 - i for i in range(NUM_LARGEST)]


def test_a_summary_of_nothing_and_of_no_file(path: Path):
    written(path)
    assert summary(path).mean_kl is None
    path.write_bytes(b'[]\n{"time_s": 1}\n\n\xff\n')
    assert summary(path).num_unreadable == 3
    with pytest.raises(FileNotFoundError):
        summary(path.with_name("no"))
