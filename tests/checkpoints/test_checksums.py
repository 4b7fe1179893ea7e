"""SHA256SUMS beside a checkpoint, and stamps of its files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from checkpoints.checksums import CHECKSUMS_FILE, check_sums
from checkpoints.errors import CheckpointError
from checkpoints.file_stamps import FileStamps

GOOD = hashlib.sha256(b"good").hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"good")
    return tmp_path


def listed(folder: Path, *lines: str) -> None:
    (folder / CHECKSUMS_FILE).write_text("\n".join(lines))


def test_without_a_list_nothing_is_compared(folder: Path):
    assert check_sums(folder) == 0


def test_files_are_compared_as_sha256sum_writes_them(folder: Path):
    listed(folder, f"{GOOD}  a", f"{GOOD.upper()} *./b", "")
    chunks: list[None] = []
    assert check_sums(folder, lambda: chunks.append(None)) == 2
    assert len(chunks) == 2


def test_a_file_that_differs_is_named(folder: Path):
    listed(folder, f"{GOOD}  a", f"{'0' * 64}  b")
    with pytest.raises(CheckpointError, match=f"b: expected SHA-256 {'0' * 64} .* found {GOOD}"):
        check_sums(folder)


def test_a_file_that_is_not_there_is_named(folder: Path):
    listed(folder, f"{GOOD}  c")
    with pytest.raises(CheckpointError, match="c: expected a file that SHA256SUMS names, found"):
        check_sums(folder)


def test_of_one_file_only_its_own_line_counts(folder: Path):
    listed(folder, f"{GOOD}  a", f"{'0' * 64}  c")
    assert check_sums(folder / "a") == 1
    assert check_sums(folder / "b") == 0


@pytest.mark.parametrize("line", ["x", f"{GOOD}  ../a", f"{GOOD}  /etc/hosts", f"{GOOD[:9]}  a"])
def test_lines_that_are_no_list_of_the_folder_are_refused(folder: Path, line: str):
    listed(folder, line)
    with pytest.raises(CheckpointError, match="expected lines of sha256sum"):
        check_sums(folder)


def test_a_file_that_is_written_or_gone_has_another_stamp(folder: Path):
    stamps = FileStamps([folder / "a", folder / "b"])
    stamps.check()
    os.utime(folder / "b", (1, 1))
    with pytest.raises(CheckpointError, match="b: expected it as it was when it was opened"):
        stamps.check()
    (folder / "a").unlink()
    with pytest.raises(CheckpointError, match="a: expected a readable file, found No such file"):
        stamps.check()
