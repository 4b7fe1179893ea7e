"""One GPU kernel: what ptxas says of it, and which instructions it has. No JAX here.

Read are the log of `ptxas -v` and the listing of `nvdisasm -c`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

PRODUCTS = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "DMMA", "BMMA")  # of tensor cores
STREAMS = ("LDGSTS",)  # global to shared memory, asynchronous (cp.async)
GLOBAL_LOADS = ("LDG", *STREAMS)
LOCAL = ("LDL", "STL")  # local memory: a spill, or an array that is indexed at run time
LOAD_BITS = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}  # else 32

_LOG = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\s+[^\n]*Used (?P<registers>\d+) registers"
    r"(?P<rest>[^\n]*)",
    re.DOTALL,
)
_FUNCTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)
_OPCODE = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.a-z]*)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Of one entry function."""

    name: str
    registers: int  # per thread
    spill_bytes: int  # stored and loaded, per thread
    stack_bytes: int
    shared_bytes: int  # static; what is asked for at the launch comes on top
    opcodes: Mapping[str, int] = field(default_factory=dict[str, int])  # empty: not disassembled

    def products(self) -> dict[str, int]:
        """Tensor-core instructions with their shapes and types, and how many of each there are."""
        return self._of(PRODUCTS)

    def local_accesses(self) -> int:
        return sum(self._of(LOCAL).values())

    def loads(self) -> dict[int, int]:
        """Loads of global memory: how many there are of each width in bytes."""
        return self._widths(GLOBAL_LOADS)

    def streams(self) -> dict[int, int]:
        """Those of them that go to shared memory while earlier tiles are computed (cp.async)."""
        return self._widths(STREAMS)

    def _widths(self, families: tuple[str, ...]) -> dict[int, int]:
        counted: Counter[int] = Counter()
        for opcode, count in self._of(families).items():
            counted[_load_bytes(opcode)] += count
        return dict(counted)

    def _of(self, families: tuple[str, ...]) -> dict[str, int]:
        return {op: n for op, n in self.opcodes.items() if op.split(".")[0] in families}


def read_kernels(log: str, listing: str = "") -> dict[str, Kernel]:
    """By name.

    Args:
        log: what `ptxas -v` wrote.
        listing: what nvdisasm wrote of the same file; empty: opcodes are not known.
    """
    opcodes = dict(_opcodes(listing))
    return {
        found["name"]: Kernel(
            name=found["name"],
            registers=int(found["registers"]),
            spill_bytes=int(found["stores"]) + int(found["loads"]),
            stack_bytes=int(found["stack"]),
            shared_bytes=_shared(found["rest"]),
            opcodes=opcodes.get(found["name"], {}),
        )
        for found in _LOG.finditer(log)
    }


def _opcodes(listing: str) -> Iterator[tuple[str, Counter[str]]]:
    """Each function's name and its instructions."""
    _, *parts = _FUNCTION.split(listing)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        yield name, Counter(_OPCODE.findall(body))


def _shared(rest: str) -> int:
    """Of the end of a line such as "Used 40 registers, used 1 barriers, 1024 bytes smem"."""
    found = re.search(r"(\d+) bytes smem", rest)
    return int(found[1]) if found else 0


def _load_bytes(opcode: str) -> int:
    parts = opcode.split(".")[1:]
    bits = next((LOAD_BITS[part] for part in parts if part in LOAD_BITS), 32)
    return bits // 8
