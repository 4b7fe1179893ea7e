"""The process that only loads, and the watch that is held on it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bench import load_time
from bench.load_time import LoadFailed, time_load

ROOT = Path(__file__).parents[2]


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """A Python that runs `body` instead of the module; it sees the same arguments."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(load_time.sys, "executable", str(script))


def test_the_time_ends_when_the_process_says_that_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    body = "import time\nprint('{\"peak_bytes\": 2048}', flush=True)\ntime.sleep(1.0)"
    pretend(monkeypatch, tmp_path, body)
    start = time.monotonic()
    figures = time_load({}, time.monotonic)
    waited = time.monotonic() - start
    assert figures["loaded_bytes"] == 2048
    assert 0 < figures["load_s"] <= waited - 0.9  # the process was waited for, but not counted


def test_the_process_is_given_the_fields(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    body = (
        "import json, sys\n"
        "assert sys.argv[1:3] == ['-m', 'bench.load_time'], sys.argv\n"
        "assert json.loads(sys.argv[3]) == {'model': 'x y', 'max_num_seqs': 4}, sys.argv\n"
        "print('{\"peak_bytes\": null}')"
    )
    pretend(monkeypatch, tmp_path, body)
    assert time_load({"model": "x y", "max_num_seqs": 4}, time.monotonic).keys() == {"load_s"}


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "print('{}'); raise SystemExit(3)"])
def test_a_process_that_fails_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str
):
    pretend(monkeypatch, tmp_path, body)
    with pytest.raises(LoadFailed, match="exit code 3"):
        time_load({}, time.monotonic)


def test_a_model_that_is_not_there_fails_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    fields = {"model": str(tmp_path / "nothing"), "cache_dir": str(tmp_path)}
    with pytest.raises(LoadFailed, match="exit code 1"):
        time_load(fields, time.monotonic)
    words = capfd.readouterr().err
    assert "nothing" in words
    assert "Traceback" not in words
