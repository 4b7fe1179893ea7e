"""What a program launches, read from XLA's list of thunks. No JAX here.

A line is one thunk; what belongs to a loop or to a command buffer (a CUDA graph) is indented.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

COMMAND_BUFFER, KERNEL, COPY, LOOP = "kCommandBuffer", "kCustomKernel", "kCopy", "kWhile"
LIBRARY_CALLS = ("kCustomCall", "kGemm", "kCublasLtMatmul", "kConvolution")

_LINE = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+) +(?:\[[^\]]*\] *)?(?P<rest>.*)$")
_KERNEL = re.compile(
    r"(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\] +"
    r"shared_memory: (?P<shared>\d+) bytes"
)


@dataclass(frozen=True, slots=True)
class Launch:
    """One thunk."""

    kind: str
    name: str  # of a kernel; else empty
    grid: tuple[int, ...] = ()
    threads: int = 0  # of a block
    shared_bytes: int = 0  # asked for at the launch
    is_in_graph: bool = False  # part of a command buffer


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one program, in order."""

    all: tuple[Launch, ...]

    def count(self, kind: str) -> int:
        return sum(launch.kind == kind for launch in self.all)

    def outside_graphs(self) -> list[Launch]:
        """What the host would launch one by one."""
        graphs = (COMMAND_BUFFER,)
        return [x for x in self.all if not x.is_in_graph and x.kind not in graphs]

    def library_calls(self) -> int:
        return sum(launch.kind in LIBRARY_CALLS for launch in self.all)

    def of_kernel(self, name: str) -> list[Launch]:
        return [x for x in self.all if x.kind == KERNEL and x.name == name]


def read_launches(text: str) -> Launches:
    """Of a `thunk_sequence` dump."""
    return Launches(tuple(_launches(text)))


def _launches(text: str) -> Iterator[Launch]:
    graphs: list[int] = []  # the indents of the command buffers around the line
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        indent = len(found["indent"])
        while graphs and graphs[-1] >= indent:
            graphs.pop()
        yield _launch(found, is_in_graph=bool(graphs))
        if found["kind"] == COMMAND_BUFFER:
            graphs.append(indent)


def _launch(line: re.Match[str], *, is_in_graph: bool) -> Launch:
    kernel = _KERNEL.match(line["rest"])
    if kernel is None:
        return Launch(line["kind"], "", is_in_graph=is_in_graph)
    threads = 1
    for number in kernel["threads"].split(","):
        threads *= int(number)
    return Launch(
        kind=line["kind"],
        name=kernel["name"],
        grid=tuple(map(int, kernel["grid"].split(","))),
        threads=threads,
        shared_bytes=int(kernel["shared"]),
        is_in_graph=is_in_graph,
    )
