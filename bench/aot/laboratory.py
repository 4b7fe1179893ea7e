"""Compiles programs for one GPU and reads what came out, several at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.aot.compiler import Compiler
from bench.aot.facts import Examiner, Facts
from bench.aot.targets import Target
from bench.aot.toolchain import Toolchain
from jaxinfer.runtime.aot import Program


class Laboratory:
    """For one GPU. Raises: NoPlugin."""

    def __init__(self, target: Target, tools: Toolchain):
        self.target, self.compiler = target, Compiler(target)
        self._examiner = Examiner(tools, target.arch)

    def examine(self, program: Program) -> Facts:
        """`program` must have been made for this laboratory's compiler. Raises: ToolError."""
        return self._examiner.facts(self.compiler.compile(program))

    def examine_all(self, programs: Sequence[Program]) -> Iterator[Facts]:
        """In order, on all cores."""
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile") as pool:
            yield from pool.map(self.examine, programs)
