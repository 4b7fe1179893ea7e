"""What is collected from the compiler's dump folder, and what is said where there is no plugin."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench.aot import compiler
from bench.aot.compiler import SKIP_LIBRARY_CHECK, Compiler, NoPlugin, prepare_environment
from bench.aot.targets import H200


def test_a_kernel_that_was_written_twice_is_read_once(tmp_path: Path):
    for number, text in enumerate(("a", "b", "a")):
        (tmp_path / f"module_0001.jit_f.{number}.ptx").write_text(text)
    assert compiler._ptx(tmp_path) == ("a", "b")


def test_launches_are_those_after_graphs_were_made(tmp_path: Path):
    before = tmp_path / "module_0001.jit_f.thunk_sequence.txt"
    before.write_text("before")
    (tmp_path / "module_0001.jit_f.thunk_metadata.txt").write_text("no")
    assert compiler._thunks(tmp_path) == "before"
    after = tmp_path / "module_0001.jit_f.thunk_sequence_after_thunk_passes.txt"
    after.write_text("after")
    assert compiler._thunks(tmp_path) == "after"


def test_libraries_that_only_running_needs_are_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SKIP_LIBRARY_CHECK, "")
    prepare_environment()
    assert compiler.os.environ[SKIP_LIBRARY_CHECK] == "1"


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is not None, reason="JAX has plugins here"
)
def test_without_the_plugin_the_error_says_what_to_install():
    with pytest.raises(NoPlugin, match=r"jax-cuda12-plugin and jax-cuda12-pjrt .* must be"):
        Compiler(H200)
