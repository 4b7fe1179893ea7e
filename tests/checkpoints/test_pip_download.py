"""The pip subprocess, with a stand-in interpreter: no network."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.pip_download import pip_download


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch):
    """Makes sys.executable a script that records its arguments and then runs `body`."""

    def install(body: str) -> Path:
        script, record = tmp_path / "python", tmp_path / "arguments.json"
        script.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"json.dump(sys.argv[1:], open({str(record)!r}, 'w'))\n{body}\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))
        return record

    return install


def test_pip_of_the_running_interpreter_is_asked_for_one_wheel(interpreter, tmp_path: Path):
    record = interpreter("")
    pip_download("pkg==1.0", into=tmp_path, show_progress=False)
    arguments = json.loads(record.read_text())
    assert arguments[:4] == ["-m", "pip", "download", "--no-deps"]
    assert arguments[arguments.index("--dest") + 1] == str(tmp_path)
    assert arguments[-1] == "pkg==1.0"
    assert "--quiet" in arguments
    assert not any("://" in argument for argument in arguments)  # the user's index, not ours


def test_the_bar_is_passed_to_stderr_only_when_asked_for(interpreter, tmp_path: Path, capfd):
    record = interpreter("print('the bar')")
    pip_download("pkg==1.0", into=tmp_path, show_progress=True)
    assert "--quiet" not in json.loads(record.read_text())
    assert capfd.readouterr() == ("", "the bar\n")
    pip_download("pkg==1.0", into=tmp_path, show_progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_one_line_with_pips_last_error(interpreter, tmp_path: Path):
    interpreter(
        "print('WARNING: retrying', file=sys.stderr)\n"
        "print('ERROR: first', file=sys.stderr)\n"
        "print('ERROR: No matching distribution', file=sys.stderr)\n"
        "print('  hint', file=sys.stderr)\n"
        "sys.exit(1)"
    )
    with pytest.raises(CheckpointError) as caught:
        pip_download("pkg==1.0", into=tmp_path, show_progress=False)
    message = str(caught.value)
    assert message.startswith("pkg==1.0: expected pip to download it, found: ERROR: No matching")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit('/usr/bin/python: No module named pip')", "No module named pip"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_an_interpreter_without_pip_says_so(interpreter, tmp_path: Path, body: str, reason: str):
    interpreter(body)
    with pytest.raises(CheckpointError, match=reason):
        pip_download("pkg==1.0", into=tmp_path, show_progress=False)
