"""Compiled programs on disk, so that a second start traces and compiles nothing.

One folder per key; the key hashes everything that a program depends on (program_key.py), so nothing
in it is ever stale. A file says which program of which key it is and what memory that needs, under
a digest; its body is a pickle of what `jax.experimental.serialize_executable` gives. What cannot be
read, or is not the program that its name says, is reported and compiled again. Several processes
may use one folder: files appear whole, and the last one wins. JAX's own persistent cache would
still trace and lower every program at each start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jax.experimental import serialize_executable
from jax.stages import Compiled

from jaxinfer.runtime.program_memory import ProgramMemory

log = logging.getLogger(__name__)

MAX_KEYS = 16  # folders kept: one or two per model and configuration in use
MAX_BYTES = 4 << 30  # of all folders together
MAGIC = b"jaxinfer program 1\n"
DIGEST_BYTES = 32
LENGTH_BYTES = 4  # of the head, which follows
PARTIAL = ".partial"
STALE_S = 3600.0  # a file that has been partial for longer is of a process that was killed


class _Unusable(Exception):
    """A file that is not the program that it should be, and why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A program that was loaded."""

    executable: Compiled
    memory: ProgramMemory


class ProgramCache:
    """The folder of one key. Never fails: a cache that cannot be used only costs time.

    Args:
        max_bytes: of all keys together; the ones that were not used for longest are removed, never
            this one.
    """

    def __init__(self, root: Path, key: str, *, max_bytes: int = MAX_BYTES):
        self.folder = root / key
        self._root, self._key, self._max_bytes = root, key, max_bytes
        self._was_there = self.folder.is_dir()
        self._mark_used()

    def load(self, name: str) -> Kept | None:
        """The program of that name, or None if it is absent or not to be used."""
        found = self._read(name)
        if found is None:
            return None
        memory, body = found
        try:
            executable = serialize_executable.deserialize_and_load(*pickle.loads(body))
        except Exception as error:  # whatever XLA makes of a file that it does not like
            self._complain(name, f"cannot be loaded ({error})")
            return None
        return Kept(executable, memory)

    def memory(self, name: str) -> ProgramMemory | None:
        """What the program of that name needs, without loading it."""
        found = self._read(name)
        return None if found is None else found[0]

    def store(self, name: str, program: Compiled) -> ProgramMemory:
        """Keeps a program if that can be. Returns: what it needs."""
        try:
            body = pickle.dumps(serialize_executable.serialize(program))
        except Exception as error:  # a backend that cannot serialize
            log.warning("%s: cannot be serialized (%s); the next start compiles it", name, error)
            return ProgramMemory.of(program)
        memory = ProgramMemory.of(program, serialized_bytes=len(body))
        head = json.dumps({"key": self._key, "name": name, "memory": asdict(memory)}).encode()
        rest = len(head).to_bytes(LENGTH_BYTES, "big") + head + body
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(self._file(name), MAGIC + hashlib.sha256(rest).digest() + rest)
        except OSError as error:  # a full disk
            log.warning("%s: cannot be written (%s); the next start compiles it", name, error)
        return memory

    def trim(self) -> None:
        """Removes the keys over the limits, and what killed processes left in this one."""
        self._mark_used()
        self._remove_stale()
        kept_keys, kept_bytes = 0, 0
        for folder in self._by_last_use():
            kept_keys, kept_bytes = kept_keys + 1, kept_bytes + _bytes_in(folder)
            is_over = kept_keys > MAX_KEYS or kept_bytes > self._max_bytes
            if is_over and folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)

    def num_bytes(self) -> int:
        """Of this key on disk."""
        return _bytes_in(self.folder)

    def _read(self, name: str) -> tuple[ProgramMemory, bytes] | None:
        try:
            return self._checked(name, self._file(name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            if self._was_there:
                log.info("%s: is missing; compiling %s", self._file(name), name)
        except OSError as error:
            self._complain(name, f"cannot be read ({error.strerror})")
        except _Unusable as error:
            self._complain(name, str(error))
        return None

    def _checked(self, name: str, content: bytes) -> tuple[ProgramMemory, bytes]:
        """Raises: _Unusable."""
        start = len(MAGIC) + DIGEST_BYTES
        if not content.startswith(MAGIC):
            raise _Unusable("is not a program of this version")
        rest = content[start:]
        if hashlib.sha256(rest).digest() != content[len(MAGIC) : start]:
            raise _Unusable("is damaged")
        end = LENGTH_BYTES + int.from_bytes(rest[:LENGTH_BYTES], "big")
        try:
            head = json.loads(rest[LENGTH_BYTES:end])
            own_key, own_name, memory = head["key"], head["name"], ProgramMemory(**head["memory"])
        except (ValueError, KeyError, TypeError) as error:
            raise _Unusable("has no head that can be read") from error
        if own_key != self._key:
            raise _Unusable(f"is of another key, {own_key}")
        if own_name != name:
            raise _Unusable(f"is another program, {own_name}")
        return memory, rest[end:]

    def _complain(self, name: str, reason: str) -> None:
        log.warning("%s: %s; compiling %s again", self._file(name), reason, name)

    def _write(self, file: Path, content: bytes) -> None:
        """All of it or nothing: another start may read at any time, and another user may, too."""
        partial = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}{PARTIAL}")
        try:
            partial.write_bytes(content)
            os.replace(partial, file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _mark_used(self) -> None:
        try:
            os.utime(self.folder)
        except OSError:
            return

    def _remove_stale(self) -> None:
        for partial in self.folder.glob(f"*{PARTIAL}"):
            try:
                if time.time() - partial.stat().st_mtime > STALE_S:
                    partial.unlink()
            except OSError:
                continue

    def _by_last_use(self) -> list[Path]:
        """All keys, this one first, then the one that was used last."""
        try:
            used = [(f.stat().st_mtime, f) for f in self._root.iterdir() if f.is_dir()]
        except OSError:  # another process removes keys, too
            return []
        return [f for _, f in sorted(used, key=lambda u: (u[1] != self.folder, -u[0]))]

    def _file(self, name: str) -> Path:
        return self.folder / (name.replace(" ", "_").replace("=", "") + ".bin")


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total
