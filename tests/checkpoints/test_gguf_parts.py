"""A GGUF model split into several files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from checkpoints.contents import read_contents
from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource


@pytest.fixture
def whole(tmp_path: Path, tiny) -> Path:
    (tmp_path / "whole").mkdir()
    vocabulary = tiny.vocabulary(tiny.byte_level(), "smollm")
    return tiny.gguf(tmp_path / "whole" / "m.gguf", tiny.model(), vocabulary)


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    """The same in three parts, beside a file that is not of them."""
    folder = tmp_path / "parts"
    folder.mkdir()
    split(whole, folder / "m.gguf", size=8)
    (folder / "README.md").write_text("three parts")
    return folder


def split(whole: Path, path: Path, *, size: int) -> None:
    """As gguf-split does, by the package's own writer."""
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=size)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def part(number: int, of: int = 3, name: str = "m") -> str:
    return f"{name}-{number:05d}-of-{of:05d}.gguf"


@pytest.mark.parametrize("given", ["", part(1), part(2), part(3)])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_any_part_and_the_folder_open_the_whole_model(folder, whole, given, is_mapped):
    found = open_checkpoint(folder / given, is_mapped=is_mapped)
    expected = open_checkpoint(whole)
    assert found.path == folder / part(1)
    assert found.files == tuple(folder / part(i) for i in (1, 2, 3))
    assert found.version == open_checkpoint(folder).version
    assert found.config == expected.config
    assert set(found.source.names()) == set(expected.source.names())
    for name in expected.source.names():
        np.testing.assert_array_equal(found.source.read(name), expected.source.read(name))
    found.close()
    with pytest.raises(CheckpointError, match="found none"):
        found.source.read("model.norm.weight")


@pytest.mark.parametrize("given", ["", part(2)])
def test_inspecting_one_shows_the_tensors_of_all(folder: Path, whole: Path, given: str):
    found, expected = read_contents(folder / given), read_contents(whole)
    assert not found.faults
    assert found.files == [folder / part(i) for i in (1, 2, 3)]
    assert found.tensors == expected.tensors
    assert found.metadata["general.architecture"] == "llama"


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_part_is_named(folder: Path, missing: int):
    (folder / part(missing)).unlink()
    text = f"{part(missing)}: expected part {missing} of 3, found no such file"
    for given in {1, 2, 3} - {missing}:
        assert text in refused(folder / part(given))
    assert text in refused(folder)


def test_a_part_under_anothers_name_is_named(folder: Path):
    shutil.copy(folder / part(1), folder / part(2))
    assert f"{part(2)}: expected part 2 of 3, found part 1 of 3" in refused(folder)
    assert f"{part(2)}: expected part 2 of 3, found part 1 of 3" in refused(folder / part(2))


def test_a_whole_file_under_a_parts_name_is_named(folder: Path, whole: Path):
    shutil.copy(whole, folder / part(3))
    assert f"{part(3)}: expected part 3 of 3, found another file" in refused(folder / part(1))


def test_parts_of_different_models_are_refused(folder: Path, whole: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    split(whole, tmp_path / "other" / "m.gguf", size=7)
    shutil.copy(tmp_path / "other" / part(2), folder / part(2))
    assert "once, found it in" in refused(folder)
    shutil.copy(tmp_path / "other" / part(3), folder / part(3))
    shutil.copy(tmp_path / "other" / part(2), folder / part(2))
    shutil.copy(folder / part(1), tmp_path / "other" / part(1))
    assert "parts of different models?" in refused(folder)


def test_a_renamed_part_is_refused(folder: Path):
    (folder / part(1)).rename(folder / "one.gguf")
    assert "expected a name like model-00001-of-00003.gguf" in refused(folder / "one.gguf")
    (folder / "one.gguf").rename(folder / part(1, of=4))
    assert "part of a split of 3" in refused(folder / part(1, of=4))


def test_a_folder_with_another_model_beside_the_parts_is_not_guessed_at(folder: Path, whole: Path):
    shutil.copy(whole, folder / "n.gguf")
    assert "found 4" in refused(folder)
    (folder / "n.gguf").unlink()
    shutil.copy(folder / part(1), folder / part(1, name="n"))
    assert "found 4" in refused(folder)


def test_a_whole_file_may_be_called_as_a_part(tmp_path: Path, whole: Path):
    shutil.copy(whole, tmp_path / part(1, of=1))
    assert open_checkpoint(tmp_path / part(1, of=1)).files == (tmp_path / part(1, of=1),)
    shutil.copy(whole, tmp_path / part(2))
    assert GGUFSource(tmp_path / part(2)).files == (tmp_path / part(2),)


@pytest.mark.parametrize("value", [-1, 1 << 40, 2.0, "3", [3, 3]])
def test_an_impossible_number_of_parts_is_refused(tmp_path: Path, tiny, value: Any):
    def add(writer: gguf.GGUFWriter) -> None:
        kinds = {int: "add_int64", float: "add_float32", str: "add_string", list: "add_array"}
        getattr(writer, kinds[type(value)])("split.count", value)

    path = tiny.gguf(tmp_path / part(1), tiny.model(), extra=add)
    with pytest.raises(CheckpointError, match=r"expected (a name like|metadata 'split\.count')"):
        GGUFSource(path)
