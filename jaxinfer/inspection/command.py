"""A checkpoint by name to what it holds and whether it would load: the work behind the command."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.contents import read_contents
from checkpoints.resolve import resolve
from jaxinfer.config import EngineConfig
from jaxinfer.inspection.loading import plan_loading
from jaxinfer.inspection.report import Inspection
from jaxinfer.runtime.memory_budget import MemoryBudget, read_budget


@dataclass(frozen=True, slots=True)
class InspectOrder:
    """What is looked at, and for which machine."""

    config: EngineConfig  # of the engine that would load it
    memory_bytes: int | None  # of the machine that it is planned for; None: this one


def inspect_checkpoint(order: InspectOrder) -> Inspection:
    """Reads heads and small files. Raises: CheckpointError if there is no such model."""
    source = order.config.source
    path = resolve(source.model, show_progress=order.config.show_progress)
    contents = read_contents(path)
    try:
        return Inspection(contents, plan_loading(contents, order.config, _budget(order)))
    finally:
        if contents.checkpoint is not None:
            contents.checkpoint.close()


def _budget(order: InspectOrder) -> MemoryBudget:
    if order.memory_bytes is not None:
        return MemoryBudget(order.memory_bytes, 0, None)
    return read_budget(order.config.memory_utilization)
