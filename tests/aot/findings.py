"""What the compiler made of the programs that the tests ask for, on one GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bench.aot.cases import Case
from bench.aot.facts import Facts
from bench.aot.laboratory import Laboratory
from bench.aot.programs import LLAMA, ModelPrograms
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
        self._models: dict[tuple[str, str, int], ModelPrograms] = {}
        self._found: dict[tuple[str, int], Future[Facts]] = {}
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        for case in expected:
            self._begin(laboratory.compiler.case(case))

    @property
    def target(self) -> Target:
        return self._laboratory.target

    def case(self, case: Case) -> Facts:
        return self._begin(self._laboratory.compiler.case(case)).result()

    def model(
        self, model: str = LLAMA, weights: str = "bf16", num_layers: int = FEW_LAYERS
    ) -> ModelPrograms:
        key = model, weights, num_layers
        if key not in self._models:
            self._models[key] = ModelPrograms(
                self._laboratory.compiler, model=model, weights=weights, num_layers=num_layers
            )
        return self._models[key]

    def step(
        self, kind: str, model: str = LLAMA, weights: str = "bf16", num_layers: int = FEW_LAYERS
    ) -> Facts:
        """Of the largest `decode` or `prefill`."""
        programs = self.model(model, weights, num_layers)
        program = programs.decode() if kind == "decode" else programs.prefill()
        return self._begin(program, num_layers).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, program: Program, num_layers: int = 0) -> Future[Facts]:
        key = program.name, num_layers
        if key not in self._found:
            self._found[key] = self._pool.submit(self._laboratory.examine, program)
        return self._found[key]
