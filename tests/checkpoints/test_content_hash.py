"""The version id of a checkpoint's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoints import content_hash as module
from checkpoints.content_hash import content_hash
from checkpoints.errors import CheckpointError


def write(path: Path, content: bytes | bytearray) -> Path:
    path.write_bytes(content)
    return path


def test_names_do_not_matter_but_content_and_order_do(tmp_path: Path):
    a, b = write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    c = write(tmp_path / "c", b"one")
    assert content_hash([a, b]) == content_hash([c, b])
    assert content_hash([a, b]) != content_hash([b, a])
    assert len(content_hash([])) == 16


def test_the_border_between_two_files_matters(tmp_path: Path):
    first = [write(tmp_path / "a", b"ab"), write(tmp_path / "b", b"c")]
    second = [write(tmp_path / "c", b"a"), write(tmp_path / "d", b"bc")]
    assert content_hash(first) != content_hash(second)


def test_every_byte_counts_up_to_the_limit(tmp_path: Path):
    content = bytearray(os.urandom(3 << 20))
    before = content_hash([write(tmp_path / "a", content)])
    content[len(content) // 2] ^= 1
    assert content_hash([write(tmp_path / "a", content)]) != before


@pytest.mark.parametrize("at", [0, 999, 1000, -1])
def test_a_large_file_counts_by_head_samples_and_end(tmp_path: Path, monkeypatch, at: int):
    for name, value in (
        ("FULL_BYTES", 0),
        ("HEAD_BYTES", 1000),
        ("BLOCK_BYTES", 10),
        ("NUM_BLOCKS", 4),
    ):
        monkeypatch.setattr(module, name, value)
    content = bytearray(100_000)
    before = content_hash([write(tmp_path / "a", content)])
    assert content_hash([write(tmp_path / "b", bytes(99_999))]) != before  # the size counts
    content[at] = 1
    assert content_hash([write(tmp_path / "a", content)]) != before


def test_a_file_that_is_gone_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match="gone: expected a readable file"):
        content_hash([tmp_path / "gone"])
