"""A folder that appears complete or not at all: written beside its place, then renamed.

Knows nothing of what is written.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from checkpoints.errors import CheckpointError

log = logging.getLogger(__name__)

LOCK = ".lock"  # dies with the process that holds it


class UnfinishedFolder:
    """`.NAME.unfinished` beside `out`, empty at first; one process at a time writes it.

    What a killed process left there is removed, and named in the log.

    Args:
        num_bytes: about what will be written.
    Raises: CheckpointError if `out` exists, another process writes it, or the disk has no room.
    """

    def __init__(self, out: Path, num_bytes: int):
        self.out = out.absolute()
        self.path = self.out.parent / f".{out.name}.unfinished"
        self._check_absent()
        check_room(self.path, num_bytes)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / LOCK)
            self._lock.acquire(blocking=False)
            self._clear()
        except Timeout:
            raise CheckpointError(
                f"{out}: expected to be the only one who writes it, found {self.path} in use by "
                "another process; wait for it, or take another folder"
            ) from None
        except OSError as error:
            raise self.failure(error) from None

    def sync(self) -> None:
        """All that was written so far is on disk, for those to read who may read the folder.

        Raises: OSError.
        """
        mode = self.path.stat().st_mode & 0o666  # the safetensors package asks for its owner alone
        for file in sorted(self.path.rglob("*")):
            if file.is_file():
                file.chmod(mode)
            _sync(file)
        _sync(self.path)

    def finish(self) -> None:
        """All of it on disk, then in its place. Raises: CheckpointError; nothing is there then."""
        self._check_absent()
        try:
            self.sync()
            os.rename(self.path, self.out)
            self._lock.release()
            (self.out / LOCK).unlink(missing_ok=True)
            _sync(self.out.parent)
        except OSError as error:
            raise self.failure(error) from None

    def discard(self) -> None:
        """Nothing is left of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def failure(self, error: OSError) -> CheckpointError:
        """What to raise where writing failed."""
        free = shutil.disk_usage(_existing(self.path)).free
        return CheckpointError(
            f"{self.out}: expected to write it, found {error.strerror or error} "
            f"({free:,} bytes are free); nothing is left of it"
        )

    def _check_absent(self) -> None:
        if self.out.exists() or self.out.is_symlink():
            raise CheckpointError(
                f"{self.out}: expected a folder that is not there yet, found one; "
                "remove it or take another name"
            )

    def _clear(self) -> None:
        left = [path for path in self.path.iterdir() if path.name != LOCK]
        if left:
            log.warning("%s: removed what a run that did not finish had left", self.path)
        for path in left:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def check_room(path: Path, num_bytes: int) -> None:
    """Raises: CheckpointError if the disk where `path` will be has not so many bytes free."""
    free = shutil.disk_usage(_existing(path)).free
    if free < num_bytes:
        raise CheckpointError(
            f"{path.parent}: expected {num_bytes:,} bytes free for the checkpoint, found {free:,}; "
            "make room or take a folder on another disk"
        )


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
