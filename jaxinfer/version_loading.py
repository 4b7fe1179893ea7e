"""Where new versions come from: found, checked against what runs, and sent on the way that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from checkpoints.errors import CheckpointError
from jaxinfer.config import EngineConfig
from jaxinfer.fitting_version import FittingVersion
from jaxinfer.found_model import FoundModel, find_model
from jaxinfer.loaded_versions import LoadedVersions, Origin
from jaxinfer.models.decoder import Decoder
from jaxinfer.new_version import OpenVersion
from jaxinfer.own_engine_version import OwnEngineVersion
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.version_order import VersionOrder


class VersionLoading:
    """The `VersionSource` over what runs.

    Args:
        config: of what runs.
        found: the model that runs; its checkpoint may be closed.
        cache_dir: jaxinfer's; models that are fetched go there.
        programs: name of the folder in it where compiled programs are kept.
    """

    def __init__(
        self,
        config: EngineConfig,
        found: FoundModel,
        runner: ModelRunner,
        plan: MemoryPlan,
        *,
        cache_dir: Path,
        programs: str,
    ):
        self._config, self._running = config, found.decoder
        self._cache_dir, self._programs_dir = cache_dir, cache_dir / programs
        first = found.version, Origin.of(config.source, found)
        self._loaded = LoadedVersions(runner, plan, first)

    def bytes_by_kind(self) -> dict[str, int]:
        """Weights, programs and kv_pool of all versions, and of those on their way in. Any thread
        may ask.
        """
        return self._loaded.bytes_by_kind()

    def open(
        self, order: VersionOrder, on_progress: Callable[[str], None] = lambda phase: None
    ) -> OpenVersion:
        """See `VersionSource`. The version that runs may be opened, too: that is a reload."""
        on_progress("find model")
        found = find_model(
            order.source,
            self._running.arithmetic.backend,
            self._cache_dir,
            max_model_len=self._config.scheduler.max_model_len,
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
        difference: str | None = "the engine that was there first is gone"
        if not self._loaded.runner.is_closed:
            longest = self._loaded.plan.max_model_len
            difference = _difference(found.decoder, self._running, longest)
        if difference is None:
            return FittingVersion(found, order, self._loaded)
        config = dataclasses.replace(self._config, source=order.source)
        return OwnEngineVersion(
            found,
            config,
            self._loaded,
            programs_dir=self._programs_dir,
            difference=difference,
        )


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
