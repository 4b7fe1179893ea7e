"""A version on its way in that the running programs do not compute: with an engine of its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

from checkpoints.checkpoint import Checkpoint
from checkpoints.checksums import check_sums
from checkpoints.file_stamps import FileStamps
from jaxinfer.config import EngineConfig
from jaxinfer.errors import Conflict
from jaxinfer.found_model import FoundModel
from jaxinfer.loaded_versions import LoadedVersions
from jaxinfer.models.registry import Decoder
from jaxinfer.new_version import Manner, NewVersion
from jaxinfer.runtime.memory_budget import read_budget
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.runtime.pace import Pace
from jaxinfer.runtime.steps import Params
from jaxinfer.runtime.weights import load_weights
from jaxinfer.second_engine import load_engine


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
        self._stamps = FileStamps(found.checkpoint.files)
        self._is_closed = threading.Event()
        self._pace = Pace()
        self._is_loading = False
        self.name, self.root = found.version, config.source.model
        self.weights_bytes = found.decoder.params_bytes
        self.lines = (f"not what the running programs compute: {difference}",)

    def load(self, on_progress: Callable[[str], None]) -> NewVersion:
        """See `OpenVersion` and `load_engine`. `close` ends it from another thread.

        Raises: also Conflict if it was closed.
        """
        self._is_loading = True
        try:
            return self._made(on_progress)
        finally:
            self._found.checkpoint.close()

    def close(self) -> None:
        self._is_closed.set()
        if not self._is_loading:
            self._found.checkpoint.close()

    def _go_on(self) -> None:
        if self._is_closed.is_set():
            raise Conflict(f"version {self.name} was given up while it was read")
        self._pace.rest()

    def _made(self, on_progress: Callable[[str], None]) -> NewVersion:
        self._pace = Pace()

        def go_on(phase: str) -> None:
            self._go_on()
            on_progress(phase)

        go_on("compare checksums")
        check_sums(self._found.checkpoint.path, self._go_on)
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
            load=self._weights,
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

    def _weights(self, checkpoint: Checkpoint, decoder: Decoder) -> Params:
        placed = self._loaded.begin()
        try:
            params = load_weights(
                checkpoint, decoder, on_tensor=self._go_on, put=placed.put, is_in_background=True
            )
            self._stamps.check()
        except BaseException:
            placed.free()
            raise
        finally:
            self._loaded.settle(placed)
        return params
