"""What the compiler made of the programs that the tests ask for, on one GPU."""

from __future__ import annotations

from bench.aot.facts import Facts
from bench.aot.laboratory import Laboratory
from bench.aot.programs import ModelPrograms
from bench.aot.targets import Target

FEW_LAYERS = 4


class Findings:
    """Looked up, or compiled at the first question."""

    def __init__(self, laboratory: Laboratory):
        self._laboratory = laboratory
        self._models: dict[int, ModelPrograms] = {}
        self._steps: dict[tuple[str, int], Facts] = {}

    @property
    def target(self) -> Target:
        return self._laboratory.target

    def model(self, num_layers: int = FEW_LAYERS) -> ModelPrograms:
        if num_layers not in self._models:
            self._models[num_layers] = ModelPrograms(
                self._laboratory.compiler, num_layers=num_layers
            )
        return self._models[num_layers]

    def step(self, kind: str, num_layers: int = FEW_LAYERS) -> Facts:
        """Of the largest `decode` or `prefill`."""
        if (kind, num_layers) not in self._steps:
            model = self.model(num_layers)
            program = model.decode() if kind == "decode" else model.prefill()
            self._steps[kind, num_layers] = self._laboratory.examine(program)
        return self._steps[kind, num_layers]
