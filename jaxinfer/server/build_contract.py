"""What the server asks of the build, which it does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.new_version import VersionSource
    from jaxinfer.tokenizer import Tokenizer


class Built(Protocol):
    """What the build gives: an engine that is ready to step, and facts about it."""

    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def summary(self) -> Mapping[str, Any]: ...
    @property
    def memory_bytes(self) -> Mapping[str, int]: ...
    @property
    def version_source(self) -> VersionSource | None: ...
    def close(self) -> None: ...
    def compile_events(self) -> Mapping[str, int]: ...


Build = Callable[[Callable[[str], None]], Built]
"""Takes a function that is told what is being done, in words."""
