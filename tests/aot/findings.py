"""What the compiler made of the programs that the tests ask for, on one GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bench.aot.cases import Case
from bench.aot.facts import Facts
from bench.aot.laboratory import Laboratory
from bench.aot.programs import ModelPrograms
from bench.aot.targets import Target
from jaxinfer.runtime.aot import Program

FEW_LAYERS = 2


class Findings:
    """Each program is compiled once, on the other cores while tests of the first ones run.

    Args:
        expected: cases that will be asked for.
    """

    def __init__(self, laboratory: Laboratory, expected: Sequence[Case]):
        self._laboratory = laboratory
        self._models: dict[tuple[str, int], ModelPrograms] = {}
        self._found: dict[tuple[str, int], Future[Facts]] = {}
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        for case in expected:
            self._begin(laboratory.compiler.case(case))

    @property
    def target(self) -> Target:
        return self._laboratory.target

    def case(self, case: Case) -> Facts:
        return self._begin(self._laboratory.compiler.case(case)).result()

    def model(self, weights: str = "bf16", num_layers: int = FEW_LAYERS) -> ModelPrograms:
        key = weights, num_layers
        if key not in self._models:
            compiler = self._laboratory.compiler
            self._models[key] = ModelPrograms(compiler, weights=weights, num_layers=num_layers)
        return self._models[key]

    def step(self, kind: str, weights: str = "bf16", num_layers: int = FEW_LAYERS) -> Facts:
        """Of the largest `decode` or `prefill`."""
        model = self.model(weights, num_layers)
        program = model.decode() if kind == "decode" else model.prefill()
        return self._begin(program, num_layers).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, program: Program, num_layers: int = 0) -> Future[Facts]:
        key = program.name, num_layers
        if key not in self._found:
            self._found[key] = self._pool.submit(self._laboratory.examine, program)
        return self._found[key]
