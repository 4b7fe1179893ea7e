"""A version of the weights on its way in: found, read and checked, not yet served.

Host only: no JAX. The build finds and reads it, on a thread of the caller's; the server decides
what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxinfer.engine import Engine
from jaxinfer.version_order import VersionOrder
from jaxinfer.versions import ModelVersion

Manner = Literal["beside", "stream", "engine"]


@dataclass(frozen=True, slots=True)
class NewVersion:
    """How it gets in depends on `manner`.

    beside: its parameters are on the device, and `install`, on the engine thread between two
        steps, makes the running engine take requests of it.
    stream: nothing is on the device. `install` replaces the parameters of the current version,
        tensor by tensor, while no sequence lives and no step is under way; it takes long, and the
        engine must not step meanwhile.
    engine: it has an engine of its own, with its own pages and programs, which is ready to step.

    discard: frees what it holds: before `install`, or when its own engine is closed.
    """

    model_version: ModelVersion
    manner: Manner
    root: str  # what it was loaded from
    generation_config: Mapping[str, Any]  # the checkpoint's defaults, Hugging Face keys
    max_model_len: int  # tokens of prompt and output
    vocab_size: int
    weights_bytes: int
    lines: tuple[str, ...]  # for people: its format and what that costs, what was planned
    install: Callable[[Engine], None]
    discard: Callable[[], None]
    engine: Engine | None = None  # with manner `engine`

    @property
    def name(self) -> str:
        """The content hash."""
        return self.model_version.name


class OpenVersion(Protocol):
    """One that was found, whose headers fit; its weights have not been read."""

    @property
    def name(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def manner(self) -> Manner: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def lines(self) -> tuple[str, ...]: ...

    def load(self, on_progress: Callable[[str], None]) -> NewVersion:
        """Reads, checks and places the weights, resting as long as it works. Closes this.

        Raises: CheckpointError for weights that are damaged, ConfigError, MemoryError.
        """
        ...

    def close(self) -> None: ...


class VersionSource(Protocol):
    """Where versions come from."""

    def open(self, order: VersionOrder, on_progress: Callable[[str], None]) -> OpenVersion:
        """Finds it, which may download, and checks what can be said before weights are read.

        Raises: CheckpointError, ConfigError: what was expected, what was found, what to do.
        """
        ...
