"""Whether files are still those that were opened: by size, time and inode, not by content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from checkpoints.errors import CheckpointError


class FileStamps:
    """Taken when it is made. Raises: CheckpointError for a file that is not there."""

    def __init__(self, files: Sequence[Path]):
        self._stamps = {file: _stamp(file) for file in files}

    def check(self) -> None:
        """Raises: CheckpointError for a file that is gone, or was written since."""
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                raise CheckpointError(
                    f"{file}: expected it as it was when it was opened, found it written since; "
                    "load it again when it is complete"
                )


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError as error:
        raise CheckpointError(f"{file}: expected a readable file, found {error.strerror}") from None
    return found.st_size, found.st_mtime_ns, found.st_ino
