"""What a compiled program is made of: kernels, launches, memory, copies.

No number here is a time of the GPU; those of the compiler are the only ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.aot.compiler import Compilation
from bench.aot.kernel import Kernel, read_kernels
from bench.aot.launches import COMMAND_BUFFER, COPY, KERNEL, LOOP, Launches, read_launches
from bench.aot.toolchain import Toolchain
from jaxinfer.runtime.program_memory import ProgramMemory

Shape = tuple[int, ...]

_ENTRY = re.compile(r"^\.visible \.entry (\w+)", re.MULTILINE)
_COPY = re.compile(r" = \w+\[([\d,]*)\]\S* copy(?:-start)?\(")
_OURS = re.compile(r'op_name="[^"]*?([^"/]+)/pallas_call"')
_PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)\b")


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one program."""

    name: str
    kernels: Mapping[str, Kernel]
    launches: Launches
    memory: ProgramMemory
    argument_bytes: int
    ours: frozenset[str]  # the names of those kernels that are Pallas kernels
    copied: tuple[Shape, ...]  # of each copy in the optimised program
    lower_s: float
    compile_s: float

    def shared_bytes(self, kernel: str) -> int:
        """Of a block: what the kernel has, and the most that it is launched with."""
        asked = [launch.shared_bytes for launch in self.launches.of_kernel(kernel)]
        return self.kernels[kernel].shared_bytes + max(asked, default=0)

    def as_json(self) -> dict[str, Any]:
        """Without the kernels that were not disassembled."""
        launches = self.launches
        kinds = (KERNEL, COPY, LOOP, COMMAND_BUFFER)
        return {
            "program": self.name,
            "launches": {kind: launches.count(kind) for kind in kinds},
            "outside_graphs": len(launches.outside_graphs()),
            "library_calls": launches.library_calls(),
            "argument_bytes": self.argument_bytes,
            "memory": dataclasses.asdict(self.memory),
            "kernels": [self._kernel_json(x) for x in self.kernels.values() if x.opcodes],
            "lower_s": self.lower_s,
            "compile_s": self.compile_s,
        }

    def _kernel_json(self, kernel: Kernel) -> dict[str, Any]:
        return {
            "name": kernel.name,
            "is_ours": kernel.name in self.ours,
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "shared_bytes": self.shared_bytes(kernel.name),
            "products": kernel.products(),
            "loads": kernel.loads(),
            "local_accesses": kernel.local_accesses(),
        }

    def our_kernels(self) -> dict[str, Kernel]:
        return {name: self.kernels[name] for name in sorted(self.ours)}

    def with_products(self) -> dict[str, Kernel]:
        """The kernels that use tensor cores."""
        return {name: kernel for name, kernel in self.kernels.items() if kernel.products()}


class Examiner:
    """Reads compilations; a kernel that several programs have is assembled once.

    Disassembled are Pallas kernels and what has matrix products: it takes a third of a second each.
    """

    def __init__(self, toolchain: Toolchain, arch: str):
        self._toolchain, self._arch = toolchain, arch
        self._known: dict[str, tuple[dict[str, Kernel], int]] = {}

    def facts(self, compilation: Compilation) -> Facts:
        """Raises: ToolError."""
        kernels: dict[str, Kernel] = {}
        ours: set[str] = set()
        called = frozenset(_OURS.findall(compilation.hlo))
        code_bytes = 0
        for ptx in compilation.ptx:
            names = {name for name in _ENTRY.findall(ptx) if _called(name) in called}
            is_listed = bool(names) or _PRODUCT.search(ptx) is not None
            found, size = self._read(ptx, is_listed=is_listed)
            ours |= names
            kernels |= found
            code_bytes += size
        told = compilation.executable.memory_analysis()
        return Facts(
            name=compilation.name,
            kernels=kernels,
            launches=read_launches(compilation.thunks),
            memory=ProgramMemory.of(compilation.executable, serialized_bytes=code_bytes),
            argument_bytes=told.argument_size_in_bytes if told is not None else 0,
            ours=frozenset(ours),
            copied=read_copies(compilation.hlo),
            lower_s=compilation.lower_s,
            compile_s=compilation.compile_s,
        )

    def _read(self, ptx: str, *, is_listed: bool) -> tuple[dict[str, Kernel], int]:
        """The kernels of a file, and the bytes of their code."""
        if ptx not in self._known:
            self._known[ptx] = self._assembled(ptx, is_listed=is_listed)
        return self._known[ptx]

    def _assembled(self, ptx: str, *, is_listed: bool) -> tuple[dict[str, Kernel], int]:
        if _ENTRY.search(ptx) is None:  # constants alone
            return {}, 0
        assembly = self._toolchain.assemble(ptx, self._arch)
        listing = self._toolchain.disassemble(assembly.cubin) if is_listed else ""
        return read_kernels(assembly.log, listing), len(assembly.cubin)


def read_copies(hlo: str) -> tuple[Shape, ...]:
    """The shapes that an optimised program copies, also inside its fusions."""
    return tuple(_shape(found[1]) for found in _COPY.finditer(hlo))


def _shape(text: str) -> Shape:
    return tuple(int(number) for number in text.split(",") if number)


def _called(kernel: str) -> str:
    """The name that was given to pallas_call: XLA numbers the others of one name."""
    return re.sub(r"__?\d+$", "", kernel)
