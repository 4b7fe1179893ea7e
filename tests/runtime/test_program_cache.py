"""A second start loads every program; what cannot be loaded is compiled again, never an error."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest

from jaxinfer.runtime import program_cache
from jaxinfer.runtime.aot import CompileCounter, Program, Programs, make_ready
from jaxinfer.runtime.program_cache import MAX_KEYS, ProgramCache, program_key

SHAPE = jax.ShapeDtypeStruct((8,), np.float32)
INPUT = np.arange(8, dtype=np.float32)
FACTORS = {"decode rows=8": 2.0, "decode rows=16": 3.0, "sample rows=8 greedy": 5.0}


def scaled(x: jax.Array, factor: float) -> jax.Array:
    return jnp.sin(x) * factor


def toy_programs() -> list[Program]:
    """New jitted functions at each call, as a new process has."""
    return [
        Program(name, partial(jax.jit(partial(scaled, factor=factor)).lower, SHAPE))
        for name, factor in FACTORS.items()
    ]


def assert_right(programs: Programs) -> None:
    for name, factor in FACTORS.items():
        got = np.asarray(programs[name](INPUT))
        np.testing.assert_allclose(got, np.sin(INPUT) * factor, rtol=1e-5)


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache that holds the toy programs under the key "key"."""
    make_ready(toy_programs(), ProgramCache(tmp_path / "programs", "key"))
    return tmp_path / "programs"


def files(root: Path) -> list[Path]:
    return sorted((root / "key").iterdir())


def test_the_first_start_compiles_and_keeps_all(tmp_path: Path, counter: CompileCounter):
    ready: list[str] = []
    programs = make_ready(toy_programs(), ProgramCache(tmp_path, "key"), on_ready=ready.append)
    assert (programs.num_compiled, programs.num_loaded) == (3, 0)
    assert counter.count == 3
    assert sorted(ready) == sorted(FACTORS)
    assert len(files(tmp_path)) == 3
    assert_right(programs)


def test_the_second_start_loads_all_and_neither_lowers_nor_compiles(
    root: Path, counter: CompileCounter
):
    def never() -> Any:
        raise AssertionError("lowered")

    programs = [Program(name, never) for name in FACTORS]
    loaded = make_ready(programs, ProgramCache(root, "key"))
    assert (loaded.num_compiled, loaded.num_loaded) == (0, 3)
    assert counter.count == 0
    assert_right(loaded)


def test_a_loaded_program_gives_the_same_bits(root: Path):
    compiled = make_ready(toy_programs(), None)
    loaded = make_ready(toy_programs(), ProgramCache(root, "key"))
    for name in FACTORS:
        np.testing.assert_array_equal(compiled[name](INPUT), loaded[name](INPUT))


def test_without_a_cache_all_is_compiled_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    programs = make_ready(toy_programs(), None)
    assert programs.num_compiled == 3
    assert list(tmp_path.iterdir()) == []


def damage(kind: str, content: bytes) -> bytes:
    foreign = pickle.dumps("not a program")
    return {
        "truncated": content[: len(content) // 2],
        "cut in its digest": content[:10],
        "empty": b"",
        "a flipped byte": content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        "foreign": b"#!/bin/sh\necho hello\n" * 50,
        "a pickle of something else": hashlib.sha256(foreign).digest() + foreign,
        "no pickle, right digest": hashlib.sha256(b"x" * 99).digest() + b"x" * 99,
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "cut in its digest",
        "empty",
        "a flipped byte",
        "foreign",
        "a pickle of something else",
        "no pickle, right digest",
    ],
)
def test_a_damaged_file_is_reported_and_compiled_again(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
):
    victim = next(f for f in files(root) if "16" in f.name)
    victim.write_bytes(damage(kind, victim.read_bytes()))
    programs = make_ready(toy_programs(), ProgramCache(root, "key"))
    assert (programs.num_compiled, programs.num_loaded) == (1, 2)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(victim) in record.getMessage()
    assert "compiling decode rows=16 again" in record.getMessage()
    assert_right(programs)
    caplog.clear()
    assert make_ready(toy_programs(), ProgramCache(root, "key")).num_loaded == 3  # and kept again
    assert not caplog.records


def test_a_deleted_file_is_compiled_again_without_a_word(
    root: Path, caplog: pytest.LogCaptureFixture
):
    files(root)[0].unlink()
    assert make_ready(toy_programs(), ProgramCache(root, "key")).num_compiled == 1
    assert not caplog.records


def test_another_key_finds_nothing(root: Path):
    assert make_ready(toy_programs(), ProgramCache(root, "other")).num_loaded == 0


def test_a_folder_that_cannot_be_written_only_costs_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    programs = make_ready(toy_programs(), ProgramCache(tmp_path / "file" / "programs", "key"))
    assert programs.num_compiled == 3
    assert_right(programs)
    assert len(caplog.records) == 3
    assert all("cannot be written" in record.getMessage() for record in caplog.records)


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    programs = make_ready(toy_programs(), ProgramCache(tmp_path, "key"))
    assert_right(programs)
    assert files(tmp_path) == []
    assert "No space left on device" in caplog.text


def test_a_program_that_cannot_be_lowered_is_an_error(tmp_path: Path):
    def broken() -> Any:
        raise TypeError("no such shape")

    with pytest.raises(TypeError, match="no such shape"):
        make_ready([Program("broken", broken)], ProgramCache(tmp_path, "key"))


def test_trim_keeps_the_keys_that_were_used_last(tmp_path: Path):
    for age in range(MAX_KEYS + 3):
        folder = tmp_path / f"key{age}"
        folder.mkdir()
        (folder / "program.bin").write_bytes(b"x")
        os.utime(folder, (1e9 - age, 1e9 - age))
    (tmp_path / "a file").write_text("is left alone")
    oldest = f"key{MAX_KEYS + 2}"
    ProgramCache(tmp_path, oldest).trim()
    kept = {f.name for f in tmp_path.iterdir()}
    assert kept == {"a file", oldest, *(f"key{age}" for age in range(MAX_KEYS - 1))}


def test_a_key_is_its_facts_in_order():
    assert program_key(("a", 1)) == program_key(["a", 1])
    keys = {program_key(facts) for facts in ((), ("a",), ("a", 1), (1, "a"), ("a1",), ("a", "1"))}
    assert len(keys) == 6
    assert all(len(key) == 24 for key in keys)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (jax, "__version__", "9.9"),
        (jaxlib.version, "__version__", "9.9"),
        (os, "cpu_count", lambda: 77),
        (program_cache, "_cpu_features", lambda: "flags: none"),
        (program_cache, "SOURCES", ("pallas_kernels/*.py",)),
    ],
    ids=["jax", "jaxlib", "cores", "cpu", "source"],
)
def test_a_key_changes_with_what_a_program_depends_on(
    module: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
):
    before = program_key(("fact",))
    monkeypatch.setattr(module, name, value)
    assert program_key(("fact",)) != before


def test_programs_can_be_joined():
    first, second = toy_programs()[:1], toy_programs()[1:]
    joined = make_ready(first, None).merged(make_ready(second, None))
    assert joined.num_compiled == 3
    assert_right(joined)
    assert joined.get("no such program") is None
    with pytest.raises(KeyError):
        joined["no such program"]


def test_the_counter_counts_compilations_until_it_is_closed(counter: CompileCounter):
    function = jax.jit(lambda x: x * 2 + 1)
    function(INPUT)
    assert counter.count == 1
    function(INPUT)
    assert counter.count == 1
    function(INPUT[:4])
    assert counter.count == 2
    other = CompileCounter()
    other.close()
    function(INPUT[:2])
    assert (counter.count, other.count) == (3, 0)
