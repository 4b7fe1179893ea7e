"""A version on its way in that the running programs do not compute: with an engine of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxinfer.config import EngineConfig
from jaxinfer.found_model import FoundModel
from jaxinfer.loaded_versions import LoadedVersions
from jaxinfer.new_version import Manner, NewVersion
from jaxinfer.runtime.memory_budget import read_budget
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.runtime.steps import Params
from jaxinfer.second_engine import load_engine
from jaxinfer.version_reading import VersionReading


class OwnEngineVersion:
    """An `OpenVersion`. Owns what was found.

    Args:
        config: of what runs, with the source of this version.
        programs_dir: where compiled programs are kept.
        difference: why it needs an engine, in words.
    """

    manner: Manner = "engine"

    def __init__(
        self,
        found: FoundModel,
        config: EngineConfig,
        loaded: LoadedVersions,
        *,
        programs_dir: Path,
        difference: str,
    ):
        self._found, self._config, self._loaded = found, config, loaded
        self._programs_dir = programs_dir
        self._reading = VersionReading(found)
        self.name, self.root = found.version, config.source.model
        self.weights_bytes = found.decoder.params_bytes
        self.lines = (f"not what the running programs compute: {difference}",)

    def load(self, on_progress: Callable[[str], None]) -> NewVersion:
        """See `OpenVersion` and `load_engine`. `close` ends it from another thread.

        Raises: also Conflict if it was closed.
        """
        self._reading.begin()
        try:
            return self._made(on_progress)
        finally:
            self._found.checkpoint.close()

    def close(self) -> None:
        self._reading.give_up()

    def _made(self, on_progress: Callable[[str], None]) -> NewVersion:
        def go_on(phase: str) -> None:
            self._reading.go_on()
            on_progress(phase)

        go_on("compare checksums")
        self._reading.compare_checksums()
        plans: list[MemoryPlan] = []
        budget = read_budget(self._config.memory_utilization)
        version = load_engine(
            self._config,
            self._found.checkpoint,
            self._found.choice,
            self._found.decoder,
            self._found.tokenizer,
            budget.beside(self._loaded.planned_bytes),
            programs_dir=self._programs_dir,
            running_model_len=self._loaded.plan.max_model_len,
            load=lambda checkpoint, decoder: self._placed(),
            on_progress=go_on,
            on_plan=plans.append,
        )
        self._loaded.engines += plans

        def discard() -> None:
            version.discard()
            for plan in plans:
                self._loaded.engines.remove(plan)
            plans.clear()

        return dataclasses.replace(version, lines=(*self.lines, *version.lines), discard=discard)

    def _placed(self) -> Params:
        params, placed = self._reading.place(self._loaded)
        self._loaded.settle(placed)
        return params
