"""The bytes of a file, read piece by piece.

For those who must outlive their file: of a mapped one that somebody truncates, the next byte that
is touched ends the process (SIGBUS).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from checkpoints.aligned import aligned_empty
from checkpoints.errors import CheckpointError

BYTE = np.dtype(np.uint8)
MAX_SMALL_BYTES = 128 << 20  # a tokenizer.json of 262,144 tokens has 32 MiB


def check_small(path: Path) -> None:
    """Raises: CheckpointError for a file that is too large to be read at once; OSError."""
    if (size := path.stat().st_size) > MAX_SMALL_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_SMALL_BYTES} bytes, found {size}")


class FileBytes:
    """Sliced as an array of uint8 is; several threads may read at once.

    Raises: OSError if it cannot be opened.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("rb", buffering=0)

    def __getitem__(self, part: slice) -> np.ndarray:
        """A fresh array of bytes start..stop. Raises: CheckpointError if they are not there."""
        out = aligned_empty((part.stop - part.start,), BYTE)
        done = 0
        try:
            while done < len(out):
                num_read = os.preadv(self._file.fileno(), [out[done:].data], part.start + done)
                if not num_read:
                    raise CheckpointError(
                        f"{self._path}: expected bytes {part.start} to {part.stop}, found its end "
                        f"at {part.start + done}: it was cut short while it was read"
                    )
                done += num_read
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: expected a readable file, found {error.strerror}"
            ) from None
        return out

    def close(self) -> None:
        self._file.close()
