"""A short name for the content of some files, the same wherever they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkpoints.errors import CheckpointError

FULL_BYTES = 256 << 20  # up to this much in all is hashed whole
HEAD_BYTES = 4 << 20  # of a larger file: its head, where the tables are,
BLOCK_BYTES = 1 << 16  # and blocks spread evenly over the rest
NUM_BLOCKS = 256
CHUNK_BYTES = 1 << 20


def content_hash(files: Sequence[Path]) -> str:
    """16 hex digits of SHA-256 over sizes and content, in the order given; names do not matter.

    Over 256 MiB in all, a file counts by its size, its first 4 MiB and 256 blocks of 64 KiB spread
    over it, the last one included: another training run differs in all of them.
    Raises: CheckpointError if a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        sizes = [file.stat().st_size for file in files]
        is_whole = sum(sizes) <= FULL_BYTES
        for file, size in zip(files, sizes, strict=True):
            digest.update(size.to_bytes(8, "little"))
            for part in _parts(file, size, is_whole):
                digest.update(part)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: expected a readable file, found {error.strerror}"
        ) from None
    return digest.hexdigest()[:16]


def _parts(path: Path, size: int, is_whole: bool) -> Iterator[bytes]:
    head = size if is_whole else min(size, HEAD_BYTES)
    with path.open("rb") as file:
        while head > 0 and (part := file.read(min(head, CHUNK_BYTES))):
            head -= len(part)
            yield part
        if is_whole or size <= HEAD_BYTES:
            return
        last = max(HEAD_BYTES, size - BLOCK_BYTES)
        for i in range(NUM_BLOCKS):
            file.seek(HEAD_BYTES + (last - HEAD_BYTES) * i // (NUM_BLOCKS - 1))
            yield file.read(BLOCK_BYTES)
