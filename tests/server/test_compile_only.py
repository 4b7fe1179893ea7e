"""What `--compile-only` says, and its exit code; programs are made by a function of the test."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from checkpoints.errors import CheckpointError
from jaxinfer.errors import ConfigError
from jaxinfer.server.compile_only import compile_only
from jaxinfer.server.settings import parse

FACTS = {"programs": "0 loaded, 36 compiled", "folder": "/cache/key (4.0 MiB)"}


def said(compile_ahead: Callable[[Callable[[str], None]], Mapping[str, Any]]) -> tuple[int, str]:
    settings, _ = parse(["--compile-only"], {})
    assert settings.compile_only
    out = io.StringIO()
    code = compile_only(settings, compile_ahead, intro="config: x", out=out)
    return code, out.getvalue()


def test_it_says_what_was_done():
    def compile_ahead(on_progress: Callable[[str], None]) -> dict[str, Any]:
        on_progress("compile")
        return FACTS | {"seconds": {"compile": 1.25}}

    code, text = said(compile_ahead)
    assert code == 0
    lines = text.splitlines()
    assert lines[:4] == [
        "config: x",
        "compile ...",
        "programs: 0 loaded, 36 compiled",
        "folder: /cache/key (4.0 MiB)",
    ]
    assert lines[4].startswith("start-up: compile 1.2 s, total 0.0 s")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("page_size\nmust fit"), 2, "error: page_size must fit\n"),
        (CheckpointError("m: is damaged"), 1, "error: m: is damaged\n"),
        (MemoryError("no room"), 1, "error: MemoryError: no room\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error: Exception, code: int, words: str):
    def fail(on_progress: Callable[[str], None]) -> dict[str, Any]:
        raise error

    got, text = said(fail)
    assert got == code
    assert text.endswith(words)


def test_it_is_off_unless_asked_for():
    assert not parse([], {})[0].compile_only
    assert parse([], {"JAXINFER_COMPILE_ONLY": "on"})[0].compile_only
