"""The --shadow file: JSON lines of ShadowRecord, written behind the event loop's back.

No JAX. It holds prompts of users, so only its owner may read it. On disk there are FILE and FILE.1,
each of at most half of the bound: a line that FILE has no room for goes into a new FILE, after the
old one has taken the place of FILE.1. So the older half goes away, and the newer half is there
always. (A bound that was lowered holds after two such turns.)

Whatever goes wrong here costs records and nothing else: the first error is a warning, and ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
from pathlib import Path

from jaxinfer.server.shadow_record import ShadowRecord

log = logging.getLogger(__name__)

MAX_UNWRITTEN = 64  # records; more are dropped while the disk is slow
CLOSE_S = 2.0
BEGINNING = b'{"time_s": '  # of every line


class ShadowFile:
    """Takes records from one event loop; a thread of its own writes them.

    Args:
        path: created if it is not there; a file of something else is left alone.
        max_bytes: of FILE and FILE.1 together.
    """

    def __init__(self, path: Path, max_bytes: int):
        self._path, self._max_bytes = path, max_bytes // 2
        self._records: queue.Queue[ShadowRecord | None] = queue.Queue(MAX_UNWRITTEN)
        self._is_on = True
        self.num_written = 0
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="shadow-file", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        """False after the first error, and when it was closed."""
        return self._is_on

    @property
    def older(self) -> Path:
        """Where the older lines are."""
        return older_than(self._path)

    def write(self, record: ShadowRecord) -> None:
        """Returns at once; the record is dropped if too many wait, or nothing is written."""
        try:
            if self._is_on:
                self._records.put_nowait(record)
                return
        except queue.Full:
            pass
        self.num_dropped += 1

    def close(self) -> None:
        """Writes what waits, for CLOSE_S at most."""
        if self._is_on:
            with contextlib.suppress(queue.Full):
                self._records.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        self._is_on = False

    # ---- on its thread

    def _run(self) -> None:
        try:
            os.close(self._open())  # so that a bad path is told at the start
            while (record := self._records.get()) is not None:
                self._append(record.line())
        except Exception as error:
            self._is_on = False
            log.warning("--shadow %s: %s; nothing more is written to it", self._path, error)

    def _append(self, line: bytes) -> None:
        if len(line) > self._max_bytes:
            self.num_dropped += 1
            return
        file = self._open()
        size = os.fstat(file).st_size
        if size and size + len(line) > self._max_bytes:
            os.close(file)
            os.replace(self._path, self.older)
            file = self._open()
        try:
            self._write(file, line)
        finally:
            os.close(file)
        self.num_written += 1

    def _write(self, file: int, line: bytes) -> None:
        """All of it or nothing, behind a line that a crash may have torn."""
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            os.ftruncate(file, size)
            raise

    def _open(self) -> int:
        """Raises: OSError; ValueError for something that is no file of ours."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError("expected a regular file; name another one")
            if not BEGINNING.startswith(os.pread(file, len(BEGINNING), 0)):
                raise ValueError("it holds something else; name a new file")
            os.fchmod(file, 0o600)
        except BaseException:
            os.close(file)
            raise
        return file


def older_than(path: Path) -> Path:
    """FILE.1 of FILE."""
    return path.with_name(f"{path.name}.1")
