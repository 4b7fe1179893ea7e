"""What is on the device: the versions that the runner has, where each was read from, and tensors on
their way in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from jaxinfer.config import ModelSource
from jaxinfer.errors import ConfigError, NoRoom
from jaxinfer.found_model import FoundModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.runtime.steps import Params


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a version was read from, to read it again."""

    source: ModelSource
    path: Path
    content: str  # Checkpoint.version of then
    decoder: Decoder

    @classmethod
    def of(cls, source: ModelSource, found: FoundModel) -> Origin:
        checkpoint = found.checkpoint
        return cls(source, checkpoint.path, checkpoint.version, found.decoder)

    def opened(self) -> Checkpoint:
        """Raises: CheckpointError if it is not there, or is not what it was."""
        checkpoint = open_checkpoint(self.path, is_mapped=False)
        if checkpoint.version != self.content:
            checkpoint.close()
            raise CheckpointError(
                f"{self.path}: expected the content {self.content}, found {checkpoint.version}"
            )
        return checkpoint


class PlacedTensors:
    """Arrays on the device that belong to no version yet."""

    def __init__(self) -> None:
        self._arrays: list[jax.Array] = []

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in list(self._arrays))

    def put(self, array: np.ndarray) -> jax.Array:
        placed = jax.block_until_ready(jax.device_put(array))
        self._arrays.append(placed)
        return placed

    def free(self) -> None:
        for array in self._arrays:
            array.delete()
        self.forget()

    def forget(self) -> None:
        """They stay, as somebody else's."""
        self._arrays.clear()


class LoadedVersions:
    """Reads may come from any thread; what changes the runner, from the engine's.

    Args:
        plan: of the memory, with one version.
        first: the version that the runner has, and its origin.
    """

    def __init__(self, runner: ModelRunner, plan: MemoryPlan, first: tuple[str, Origin]):
        self.runner, self.plan = runner, plan
        self._origins = dict([first])
        self._on_the_way: list[PlacedTensors] = []
        self.engines: list[MemoryPlan] = []  # of versions with an engine of their own

    @property
    def weights_bytes(self) -> int:
        """On the device, of all versions of the runner, and of those on their way in."""
        placed = sum(tensors.num_bytes for tensors in list(self._on_the_way))
        return self.runner.weights_bytes + placed

    def bytes_by_kind(self) -> dict[str, int]:
        """Weights, programs and pools of all that is there."""
        engines = list(self.engines)
        all_plans = engines if self.runner.is_closed else [self.plan, *engines]
        return {
            "weights": self.weights_bytes + sum(plan.weights_bytes for plan in engines),
            "programs": sum(plan.programs_bytes for plan in all_plans),
            "kv_pool": sum(plan.pool_bytes for plan in all_plans),
        }

    @property
    def planned_bytes(self) -> int:
        """The sum of it."""
        return sum(self.bytes_by_kind().values())

    def origin_of(self, version: str) -> Origin:
        """Raises: ConfigError for a version that is not there."""
        found = self._origins.get(version)
        if found is None or version not in self.runner.versions:
            there = ", ".join(self.runner.versions)
            raise ConfigError(f"expected a version that is loaded ({there}), got {version[:80]!r}")
        return found

    def begin(self) -> PlacedTensors:
        """For a version that is on its way, until `settle`."""
        placed = PlacedTensors()
        self._on_the_way.append(placed)
        return placed

    def settle(self, placed: PlacedTensors) -> None:
        """They belong to a version now, or are freed."""
        if placed in self._on_the_way:
            self._on_the_way.remove(placed)
        placed.forget()

    def add(self, version: str, params: Params, origin: Origin) -> None:
        """Gives it to the runner, in place of what that has under the name."""
        self.runner.add_version(version, params)
        there = self.runner.versions
        self._origins = {v: own for v, own in self._origins.items() if v in there}
        self._origins[version] = origin

    def check_room(self, needed_bytes: int, what: str, *, advice: str = "") -> None:
        """Raises: NoRoom if so much is not free for another version: with what is missing, and
        what to do, of which `advice` is the best.
        """
        free = self.plan.free_bytes(self.planned_bytes)
        if free is None or needed_bytes <= free:
            return
        raise NoRoom(
            f"{what} needs {needed_bytes} bytes beside what is loaded, but {free} are free: "
            f"{needed_bytes - free} are missing; {advice}drop another version, or start with a "
            "smaller --kv-cache-memory"
        )
