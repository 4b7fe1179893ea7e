"""Compiled programs on disk, so that a second start traces and compiles nothing.

One folder per key; the key hashes everything that a program depends on, so nothing in it is ever
stale. A file is a digest and a pickle of what `jax.experimental.serialize_executable` gives. What
cannot be read is reported and compiled again. JAX's own persistent cache would still trace and
lower every program at each start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import flax
import jax
import jaxlib.version
from jax.experimental import serialize_executable
from jax.stages import Compiled

log = logging.getLogger(__name__)

MAX_KEYS = 8  # folders kept: about one per model and configuration in use
DIGEST_BYTES = 32
SOURCES = (
    "jaxinfer/config.py",
    "jaxinfer/models/*.py",
    "jaxinfer/runtime/*.py",
    "jaxinfer/scheduling/*.py",
    "pallas_kernels/*.py",
)


def program_key(facts: Iterable[object]) -> str:
    """A folder name for these facts, this JAX, this device, this CPU and this source code."""
    device = jax.devices()[0]
    digest = hashlib.sha256()
    for fact in (
        jax.__version__,
        jaxlib.version.__version__,
        flax.__version__,
        sorted(jax.config.values.items()),
        os.environ.get("XLA_FLAGS"),  # XLA reads it itself, so it is no argument of ours
        device.platform,
        device.device_kind,
        _cpu_features(),
        os.cpu_count(),
        _source_digest(),
        *facts,
    ):
        digest.update(repr(fact).encode() + b"\0")
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """Compiled CPU code uses them; on other systems than Linux the processor's name stands in."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _source_digest() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class ProgramCache:
    """The folder of one key. Never fails: a cache that cannot be used only costs time."""

    def __init__(self, root: Path, key: str):
        self._folder = root / key
        self._root = root

    def load(self, name: str) -> Compiled | None:
        """The program of that name, or None if it is absent, damaged or of another machine."""
        file = self._file(name)
        try:
            content = file.read_bytes()
        except OSError:
            return None
        digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            log.warning("%s: is damaged; compiling %s again", file, name)
            return None
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(body))
        except Exception as error:  # whatever XLA makes of a file that it does not like
            log.warning("%s: cannot be loaded (%s); compiling %s again", file, error, name)
            return None

    def store(self, name: str, program: Compiled) -> None:
        try:
            body = pickle.dumps(serialize_executable.serialize(program))
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(self._file(name), hashlib.sha256(body).digest() + body)
        except Exception as error:  # a full disk, or a backend that cannot serialize
            log.warning("%s: cannot be written (%s); the next start compiles it", name, error)

    def _write(self, file: Path, content: bytes) -> None:
        """All of it or nothing: another start may read at any time."""
        handle, partial = tempfile.mkstemp(dir=self._folder)
        try:
            with open(handle, "wb") as out:
                out.write(content)
            os.replace(partial, file)
        except BaseException:
            os.unlink(partial)
            raise

    def trim(self) -> None:
        """Marks this key as used now and removes the keys that were not used for longest."""
        try:
            os.utime(self._folder)
            folders = sorted(
                (f for f in self._root.iterdir() if f.is_dir()), key=lambda f: -f.stat().st_mtime
            )
        except OSError:
            return
        for folder in folders[MAX_KEYS:]:
            shutil.rmtree(folder, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._folder / (name.replace(" ", "_").replace("=", "") + ".bin")
