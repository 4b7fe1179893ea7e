"""The name under which compiled programs are kept: a hash of everything that they depend on."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import flax
import jax
import jaxlib.version

SOURCES = (
    "checkpoints/formats.py",  # shapes of quantized parameters
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
        device.client.platform_version,  # of a GPU: CUDA's
        _cpu_features(),
        _num_cores(),
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


def _num_cores() -> int:
    """That this process may use: XLA divides a program's work among them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _source_digest() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
