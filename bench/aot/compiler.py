"""Lowers and compiles a program for a described GPU.

jax 0.11 and newer want to be told the device while lowering, too. What the compiler writes beside
its result is collected: PTX, the list of launches, and the optimised program.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered, Wrapped

from bench.aot.cases import Case
from bench.aot.targets import Target
from jaxinfer.runtime.aot import Program
from pallas_kernels.backend import Backend

SKIP_LIBRARY_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
NEEDS_ABSTRACT_DEVICE = (0, 11)  # jax versions from here on
NO_PLUGIN = (
    "JAX cannot compile for CUDA here: jax-cuda12-plugin and jax-cuda12-pjrt {version} must be "
    "installed (`make test-aot` does it): {error}"
)


class NoPlugin(Exception):
    """The CUDA plugin is not installed, or JAX could not start it."""


def prepare_environment() -> None:
    """To be called before JAX looks for devices: its CUDA plugin then does without the libraries
    (cuBLAS, cuDNN, ...) that only running needs.
    """
    os.environ[SKIP_LIBRARY_CHECK] = "1"


@dataclass(frozen=True, slots=True)
class Compilation:
    """A program, compiled, and what was written on the way."""

    name: str
    executable: Compiled
    ptx: tuple[str, ...]  # files, each once
    thunks: str  # the list of launches
    hlo: str  # optimised
    lower_s: float
    compile_s: float


class Compiler:
    """Compiles for one GPU. Raises: NoPlugin."""

    def __init__(self, target: Target):
        self.target = target
        self._sharding = _sharding(target)

    def lower(self, function: Wrapped, *args: Any) -> Lowered:
        """A jitted function for shapes (ShapeDtypeStructs), without their devices."""
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), args
        )
        with self._device():
            return function.trace(*placed).lower(lowering_platforms=("cuda",))

    def case(self, case: Case) -> Program:
        """One kernel, as the engine's exact programs have it."""
        backend = Backend("pallas", self.target.gpu)
        jitted = jax.jit(case.function(backend), donate_argnums=case.donate)
        lower = partial(self.lower, jitted, *case.args)
        return Program(case.name, lower, backend.compiler_options)

    def compile(self, program: Program) -> Compilation:
        """`program` must have been made with this compiler's `lower`."""
        started = time.monotonic()
        lowered = program.lower()
        lower_s = time.monotonic() - started
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx.*"}
            executable = lowered.compile(compiler_options={**program.compiler_options, **dump})
            return Compilation(
                name=program.name,
                executable=executable,
                ptx=_ptx(Path(folder)),
                thunks=_thunks(Path(folder)),
                hlo=executable.as_text() or "",
                lower_s=lower_s,
                compile_s=time.monotonic() - started - lower_s,
            )

    def _device(self) -> AbstractContextManager[Any]:
        if jax.__version_info__ < NEEDS_ABSTRACT_DEVICE:
            return contextlib.nullcontext()
        device = jax.sharding.AbstractDevice(
            device_kind=self.target.device_kind, num_cores=None, platform="gpu"
        )
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        return jax.sharding.use_abstract_mesh(mesh)


def _sharding(target: Target) -> NamedSharding:
    """On the described device, whole. Raises: NoPlugin."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            target_config=target.config,
            topology="1x1x1",
        )
    except Exception as error:  # jax raises several kinds, and RuntimeError for most
        raise NoPlugin(NO_PLUGIN.format(version=jax.__version__, error=error)) from error
    return NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())


def _ptx(folder: Path) -> tuple[str, ...]:
    """Some files are written twice, under two numbers."""
    texts = {path.read_text(): None for path in sorted(folder.glob("*.ptx"))}
    return tuple(texts)


def _thunks(folder: Path) -> str:
    """After the passes that make command buffers, where there are any."""
    after = list(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))
    before = list(folder.glob("*.thunk_sequence.txt"))
    return (after or before)[0].read_text()
