"""SHA256SUMS: what a folder's files should be, by whoever made them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from checkpoints.errors import CheckpointError

CHECKSUMS_FILE = "SHA256SUMS"
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")  # as sha256sum writes it
CHUNK_BYTES = 1 << 20


def check_sums(path: Path, on_chunk: Callable[[], None] = lambda: None) -> int:
    """Reads the files that SHA256SUMS beside the weights names; nothing if there is none.

    Args:
        path: a checkpoint's folder, whose listed files must all be there; or its one file, of
            which only its own line counts.
        on_chunk: called after each MiB; what it raises ends the work.
    Returns: how many files were compared.
    Raises: CheckpointError for a file that is not what it should be, or a list that is no list.
    """
    folder = path if path.is_dir() else path.parent
    listed = _listed(folder / CHECKSUMS_FILE)
    if path.is_file():
        listed = {name: digest for name, digest in listed.items() if name == path.name}
    for name, digest in listed.items():
        found = _sha256(folder / name, on_chunk)
        if found != digest:
            raise CheckpointError(
                f"{folder / name}: expected SHA-256 {digest} by {CHECKSUMS_FILE}, found {found}; "
                "copy the file again"
            )
    return len(listed)


def _listed(path: Path) -> dict[str, str]:
    """Digest by file name; empty if there is no such list."""
    if not path.is_file():
        return {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: expected a readable text, found {error}") from None
    listed: dict[str, str] = {}
    for line in filter(None, map(str.strip, lines)):
        found = LINE.fullmatch(line)
        name = found[2].removeprefix("./") if found else ""
        if found is None or name.startswith("/") or ".." in Path(name).parts:
            raise CheckpointError(
                f"{path}: expected lines of sha256sum about files of its folder, found {line!r:.90}"
            )
        listed[name] = found[1].lower()
    return listed


def _sha256(path: Path, on_chunk: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK_BYTES):
                digest.update(part)
                on_chunk()
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a file that {CHECKSUMS_FILE} names, found {error.strerror}"
        ) from None
    return digest.hexdigest()
