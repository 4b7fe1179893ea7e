"""A second start loads every program; what cannot be loaded is compiled again, never an error."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.runtime.aot import Program, Programs, make_ready, measure
from jaxinfer.runtime.compile_counter import CompileCounter
from jaxinfer.runtime.program_cache import MAGIC, MAX_KEYS, PARTIAL, ProgramCache
from tests.program_files import remade, with_body, with_head

SHAPE = jax.ShapeDtypeStruct((8,), np.float32)
INPUT = np.arange(8, dtype=np.float32)
FACTORS = {"decode rows=8 layer": 2.0, "decode rows=16 layer": 3.0, "sample rows=8 greedy": 5.0}
ROOT = Path(__file__).parents[2]


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


DAMAGED = "is damaged"
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda c: c[: len(c) // 2], DAMAGED),
    "one byte less": (lambda c: c[:-1], DAMAGED),
    "cut in its digest": (lambda c: c[: len(MAGIC) + 10], DAMAGED),
    "cut in its magic": (lambda c: c[:10], "is not a program of this version"),
    "empty": (lambda c: b"", "is not a program of this version"),
    "an older format": (lambda c: c[len(MAGIC) :], "is not a program of this version"),
    "foreign": (lambda c: b"#!/bin/sh\necho hello\n" * 50, "is not a program of this version"),
    "another key": (lambda c: remade(c, key="other"), "is of another key, other"),
    "another name": (lambda c: remade(c, name="x rows=8"), "is another program, x rows=8"),
    "no pickle": (lambda c: with_body(c, b"x" * 99), "cannot be loaded"),
    "a pickle of something else": (lambda c: with_body(c, pickle.dumps("x")), "cannot be loaded"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_reported_and_compiled_again(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
):
    damage, reason = DAMAGES[kind]
    victim = next(f for f in files(root) if "16" in f.name)
    victim.write_bytes(damage(victim.read_bytes()))
    programs = make_ready(toy_programs(), ProgramCache(root, "key"))
    assert (programs.num_compiled, programs.num_loaded) == (1, 2)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert message.startswith(f"{victim}: {reason}")
    assert message.endswith("; compiling decode rows=16 layer again")
    assert_right(programs)
    caplog.clear()
    assert make_ready(toy_programs(), ProgramCache(root, "key")).num_loaded == 3  # and kept again
    assert not caplog.records


def test_a_byte_flipped_anywhere_is_noticed(root: Path, caplog: pytest.LogCaptureFixture):
    cache, victim = ProgramCache(root, "key"), files(root)[0]
    (name,) = (n for n in FACTORS if cache._file(n) == victim)
    content = victim.read_bytes()
    places = [*range(60), *np.random.default_rng(0).integers(0, len(content), 60), -1]
    for at in places:
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(at) % 8
        victim.write_bytes(flipped)
        assert cache.load(name) is None
        assert cache.memory(name) is None
    assert len(caplog.records) == 2 * len(places)
    victim.write_bytes(content)
    assert cache.load(name) is not None


def test_another_programs_file_under_this_name_is_refused(
    root: Path, caplog: pytest.LogCaptureFixture
):
    first, second, _ = files(root)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    programs = make_ready(toy_programs(), ProgramCache(root, "key"))
    assert (programs.num_compiled, programs.num_loaded) == (2, 1)
    assert all("is another program, decode rows=" in r.getMessage() for r in caplog.records)
    assert_right(programs)


def test_a_file_of_another_key_is_refused(root: Path, caplog: pytest.LogCaptureFixture):
    shutil.copytree(root / "key", root / "other")
    programs = make_ready(toy_programs(), ProgramCache(root, "other"))
    assert programs.num_compiled == 3
    assert all("is of another key, key; " in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("head", [b"", b"{}", b"[]", b"\xff", b'{"key": "key", "name": "n"}'])
def test_a_file_without_a_head_is_refused(
    root: Path, head: bytes, caplog: pytest.LogCaptureFixture
):
    file = sorted((root / "key").iterdir())[0]
    file.write_bytes(with_head(head))
    programs = make_ready(toy_programs(), ProgramCache(root, "key"))
    assert (programs.num_loaded, programs.num_compiled) == (2, 1)
    assert f"{file}: has no head that can be read" in caplog.text
    assert_right(programs)


def test_files_can_be_read_by_whoever_the_umask_allows(root: Path):
    before = os.umask(0o022)
    os.umask(before)
    for file in (root / "key").iterdir():
        assert file.stat().st_mode & 0o777 == 0o666 & ~before


def test_a_folder_in_the_place_of_a_file_is_left_alone(
    root: Path, caplog: pytest.LogCaptureFixture
):
    victim = files(root)[0]
    victim.unlink()
    victim.mkdir()
    programs = make_ready(toy_programs(), ProgramCache(root, "key"))
    assert (programs.num_compiled, programs.num_loaded) == (1, 2)
    assert_right(programs)
    read, written = (record.getMessage() for record in caplog.records)
    assert "cannot be read (Is a directory)" in read
    assert "cannot be written" in written
    assert victim.is_dir()


def test_a_file_that_may_not_be_read_is_replaced(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    victim, read = files(root)[0], Path.read_bytes

    def refuse(path: Path) -> bytes:  # root may read everything
        if path == victim:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert make_ready(toy_programs(), ProgramCache(root, "key")).num_compiled == 1
    assert "cannot be read (Permission denied); compiling" in caplog.text
    monkeypatch.undo()
    assert make_ready(toy_programs(), ProgramCache(root, "key")).num_loaded == 3


def test_a_deleted_file_is_compiled_again_and_told(root: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "jaxinfer")
    victim = files(root)[0]
    victim.unlink()
    assert make_ready(toy_programs(), ProgramCache(root, "key")).num_compiled == 1
    (record,) = (r for r in caplog.records if r.name.startswith("jaxinfer"))
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(f"{victim}: is missing; compiling ")


def test_the_first_start_misses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "jaxinfer")
    make_ready(toy_programs(), ProgramCache(tmp_path, "key"))
    assert not [r for r in caplog.records if r.name.startswith("jaxinfer")]


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


def make_keys(root: Path, number: int, size: int) -> None:
    """key0 is the one that was used last."""
    for age in range(number):
        folder = root / f"key{age}"
        folder.mkdir()
        (folder / "program.bin").write_bytes(b"x" * size)
        os.utime(folder, (1e9 - age, 1e9 - age))
    (root / "a file").write_text("is left alone")


def names(root: Path) -> set[str]:
    return {f.name for f in root.iterdir()} - {"a file"}


def test_trim_keeps_the_keys_that_were_used_last(tmp_path: Path):
    make_keys(tmp_path, MAX_KEYS + 3, 1)
    oldest = f"key{MAX_KEYS + 2}"
    ProgramCache(tmp_path, oldest).trim()
    assert names(tmp_path) == {oldest, *(f"key{age}" for age in range(MAX_KEYS - 1))}
    assert (tmp_path / "a file").exists()


@pytest.mark.parametrize(
    ("max_bytes", "left"),
    [(500, 5), (499, 4), (300, 3), (250, 2), (100, 1), (99, 1), (1, 1)],
)
def test_trim_bounds_the_bytes_and_never_removes_its_own_key(
    tmp_path: Path, max_bytes: int, left: int
):
    make_keys(tmp_path, 5, 100)
    ProgramCache(tmp_path, "key4", max_bytes=max_bytes).trim()  # the oldest until now
    assert names(tmp_path) == {"key4", "key0", "key1", "key2", "key3"} - {
        f"key{age}" for age in range(left - 1, 4)
    }


def test_a_key_in_use_is_the_newest_from_its_start_on(tmp_path: Path):
    """Another process that ends its start meanwhile does not remove it."""
    make_keys(tmp_path, 3, 100)
    ProgramCache(tmp_path, "key2")
    ProgramCache(tmp_path, "key1", max_bytes=200).trim()
    assert names(tmp_path) == {"key1", "key2"}


def test_what_a_killed_process_left_is_removed_after_an_hour(root: Path):
    old, new = root / "key" / f"a{PARTIAL}", root / "key" / f"b{PARTIAL}"
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (1e9, 1e9))
    make_ready(toy_programs(), ProgramCache(root, "key"))
    assert not old.exists()
    assert new.exists()


def test_what_a_program_needs_is_kept_with_it(root: Path):
    compiled, loaded = make_ready(toy_programs(), None), ProgramCache(root, "key")
    for name in FACTORS:
        memory = loaded.memory(name)
        assert memory is not None
        told: Any = compiled[name].memory_analysis()
        assert memory.temp_bytes == told.temp_size_in_bytes
        assert memory.output_bytes == told.output_size_in_bytes == 8 * 4
        assert memory.alias_bytes == 0
        assert memory.code_bytes > 1000


def test_measuring_asks_the_cache_first_and_then_the_compiler(
    tmp_path: Path, counter: CompileCounter
):
    cache = ProgramCache(tmp_path, "key")
    first = measure(toy_programs(), cache)
    assert counter.count == 3
    assert measure(toy_programs(), ProgramCache(tmp_path, "key")) == first
    assert counter.count == 3
    assert first.keys() == FACTORS.keys()


def test_an_error_of_the_caller_ends_the_work(tmp_path: Path):
    seen: list[str] = []

    def stop(name: str) -> None:
        seen.append(name)
        raise TimeoutError("enough")

    many = [Program(f"{i}", toy_programs()[0].lower) for i in range(50)]
    with pytest.raises(TimeoutError, match="enough"):
        make_ready(many, None, on_ready=stop)
    assert len(seen) < 25


PROCESS = """
import logging, sys
from pathlib import Path
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
from jaxinfer.runtime.aot import make_ready
from jaxinfer.runtime.program_cache import ProgramCache
from tests.runtime.test_program_cache import assert_right, toy_programs
print("ready", flush=True)
input()
programs = make_ready(toy_programs(), ProgramCache(Path(sys.argv[1]), "key"))
assert_right(programs)
print(programs.num_compiled + programs.num_loaded)
"""


def test_processes_that_start_at_once_do_not_hurt_each_other(tmp_path: Path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": -1, "stdout": -1, "stderr": subprocess.STDOUT, "text": True}
    started: list[Any] = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in started] == ["ready\n"] * 2
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0, told
        assert "WARNING" not in told
        assert told.splitlines()[-1] == "3"
    assert make_ready(toy_programs(), ProgramCache(tmp_path, "key")).num_loaded == 3
    assert len(files(tmp_path)) == 3


def test_programs_can_be_joined():
    first, second = toy_programs()[:1], toy_programs()[1:]
    joined = make_ready(first, None).merged(make_ready(second, None))
    assert joined.num_compiled == 3
    assert_right(joined)
    assert joined.memory.keys() == FACTORS.keys()
    assert joined.get("no such program") is None
    less = joined.without("decode rows=16 layer")
    assert less.by_name.keys() == less.memory.keys() == FACTORS.keys() - {"decode rows=16 layer"}
    assert less.num_compiled == 3
    with pytest.raises(KeyError):
        joined["no such program"]
