"""Where new versions come from: found, checked against what runs, and sent on the way that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from checkpoints.checksums import check_sums
from checkpoints.errors import CheckpointError
from jaxinfer.config import EngineConfig, ModelSource
from jaxinfer.errors import ConfigError
from jaxinfer.fitting_version import FittingVersion
from jaxinfer.found_model import FoundModel, find_model
from jaxinfer.loaded_versions import LoadedVersions, Origin
from jaxinfer.models.registry import Decoder
from jaxinfer.new_version import Manner, NewVersion, OpenVersion
from jaxinfer.runtime.low_priority import at_low_priority
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.version_order import VersionOrder

LoadEngine = Callable[[EngineConfig, FoundModel, Callable[[str], None]], NewVersion]
"""Makes an engine of its own for what was found, whose checkpoint the caller closes. Takes the
configuration that runs, with the source of the new version, and a function that is told what is
being done, in words. Runs on a thread of low priority."""


class VersionLoading:
    """The `VersionSource` over what runs.

    Args:
        config: of what runs.
        found: the model that runs; its checkpoint may be closed.
        cache_dir: jaxinfer's; models that are fetched go there.
        load_engine: None: what the running programs do not compute is refused.
    """

    def __init__(
        self,
        config: EngineConfig,
        found: FoundModel,
        runner: ModelRunner,
        plan: MemoryPlan,
        *,
        cache_dir: Path,
        load_engine: LoadEngine | None = None,
    ):
        self._config, self._running, self._cache_dir = config, found.decoder, cache_dir
        self._load_engine = load_engine
        first = found.version, Origin.of(config.source, found)
        self._loaded = LoadedVersions(runner, plan, first)

    @property
    def weights_bytes(self) -> int:
        """Of all versions of the runner, and of those on their way to it. Any thread may ask."""
        return self._loaded.weights_bytes

    def source_of(self, version: str) -> ModelSource:
        """What a version of the runner was loaded from, to load it again. Raises: ConfigError."""
        return self._loaded.origin_of(version).source

    def open(
        self, order: VersionOrder, on_progress: Callable[[str], None] = lambda phase: None
    ) -> OpenVersion:
        """See `VersionSource`. The version that runs may be opened, too: that is a reload."""
        on_progress("find model")
        found = find_model(
            order.source,
            self._running.arithmetic.backend,
            self._cache_dir,
            show_progress=False,
            is_mapped=False,
        )
        try:
            return self._opened(order, found)
        except BaseException:
            found.checkpoint.close()
            raise

    def _opened(self, order: VersionOrder, found: FoundModel) -> OpenVersion:
        _check_expected(order, found)
        difference = _difference(found.decoder, self._running, self._loaded.plan.max_model_len)
        if difference is None:
            return FittingVersion(found, order, self._loaded)
        if self._load_engine is None:
            raise ConfigError(
                f"{found.checkpoint.path}: expected a model of the running programs' shape, "
                f"found {difference}; start another server with it"
            )
        config = dataclasses.replace(self._config, source=order.source)
        return _OwnEngine(found, config, self._load_engine, difference)


class _OwnEngine:
    """An `OpenVersion` that the running programs do not compute. Owns what was found."""

    manner: Manner = "engine"

    def __init__(
        self, found: FoundModel, config: EngineConfig, load_engine: LoadEngine, difference: str
    ):
        self._found, self._config, self._load_engine = found, config, load_engine
        self.name, self.root = found.version, config.source.model
        self.weights_bytes = found.decoder.params_bytes
        self.lines = found.choice.line(), f"with an engine of its own: {difference}"

    def load(self, on_progress: Callable[[str], None]) -> NewVersion:
        def loaded() -> NewVersion:
            on_progress("compare checksums")
            check_sums(self._found.checkpoint.path)
            return self._load_engine(self._config, self._found, on_progress)

        try:
            version = at_low_priority(loaded)
        finally:
            self.close()
        return dataclasses.replace(version, lines=(*self.lines, *version.lines))

    def close(self) -> None:
        self._found.checkpoint.close()


def _check_expected(order: VersionOrder, found: FoundModel) -> None:
    expected = order.expected_version
    if expected is not None and expected != found.version:
        content = found.checkpoint.version
        rounded = f" (of files {content}, rounded while loading)" * (content != found.version)
        raise CheckpointError(
            f"{found.checkpoint.path}: expected the version {expected}, found "
            f"{found.version}{rounded}; give the files that were meant, or leave the version out"
        )


def _difference(found: Decoder, running: Decoder, max_model_len: int) -> str | None:
    """Why the running programs do not compute it; None: they do."""
    limit = found.config.max_position_embeddings
    if limit < max_model_len:
        return f"a limit of {limit} tokens (here {max_model_len})"
    if found.shares_programs_with(running):
        return None
    for name, value in dataclasses.asdict(found.config).items():
        ours = getattr(running.config, name)
        if name != "max_position_embeddings" and getattr(found.config, name) != ours:
            return f"{name} {value} (here {ours})"
    if found.arithmetic != running.arithmetic:
        return f"{_form(found)} weights (here {_form(running)})"
    return "another architecture"


def _form(decoder: Decoder) -> str:
    quantization = decoder.arithmetic.quantization
    if quantization is None or quantization.weights is None:
        return str(decoder.dtype)
    return quantization.weights.name
