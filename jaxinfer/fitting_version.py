"""A version on its way in that the running programs compute: beside the others, or in place of the
current one, tensor by tensor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing

import jax

from checkpoints.aligned import CHUNK_BYTES
from checkpoints.checkpoint import Checkpoint
from checkpoints.file_stamps import FileStamps
from jaxinfer.engine import Engine
from jaxinfer.errors import Conflict, EngineFailure
from jaxinfer.found_model import FoundModel
from jaxinfer.loaded_versions import LoadedVersions, Origin, PlacedTensors
from jaxinfer.models.decoder import Decoder
from jaxinfer.new_version import Manner, NewVersion
from jaxinfer.runtime.steps import Params
from jaxinfer.runtime.streamed_weights import stream_weights
from jaxinfer.runtime.weights import each_weight
from jaxinfer.version_order import VersionOrder
from jaxinfer.version_reading import VersionReading
from jaxinfer.versions import ModelVersion

log = logging.getLogger(__name__)


class FittingVersion:
    """An `OpenVersion`. Owns what was found.

    Raises: ConfigError if there is no room for it.
    """

    def __init__(self, found: FoundModel, order: VersionOrder, loaded: LoadedVersions):
        self._found, self._order, self._loaded = found, order, loaded
        self._reading = VersionReading(found)
        self.name, self.root = found.version, order.source.model
        self.manner: Manner = "stream" if order.swap_mode == "stream" else "beside"
        self.weights_bytes = found.decoder.params_bytes
        self.lines = (found.choice.line(), f"{self.weights_bytes} bytes of weights, {self.manner}")
        self._check_room()

    def load(self, on_progress: Callable[[str], None]) -> NewVersion:
        """See `OpenVersion`. `close` ends it from another thread.

        Raises: also Conflict if it was closed.
        """
        self._reading.begin()
        try:
            version = self._read(on_progress)
        except BaseException:
            self._found.checkpoint.close()
            raise
        if self.manner == "beside":
            self._found.checkpoint.close()
        return version

    def close(self) -> None:
        self._reading.give_up()

    def _read(self, on_progress: Callable[[str], None]) -> NewVersion:
        self._reading.go_on()
        on_progress("compare checksums")
        self._reading.compare_checksums()
        on_progress("read and check weights")
        return self._checked() if self.manner == "stream" else self._placed()

    def _placed(self) -> NewVersion:
        """Its parameters are on the device."""
        self._check_room()
        params, placed = self._reading.place(self._loaded)
        origin = Origin.of(self._order.source, self._found)
        entry = _Beside(self._loaded, self._found.model_version, params, origin, placed)
        return self._new_version(entry.install, entry.discard)

    def _checked(self) -> NewVersion:
        """All of it was read once; nothing is on the device."""
        weights = each_weight(self._found.checkpoint, self._found.decoder)
        with closing(weights):
            for _ in weights:
                self._reading.go_on()
        stamps = self._reading.stamps
        stamps.check()
        origin = Origin.of(self._order.source, self._found)
        found = self._found.checkpoint
        entry = _InPlace(self._loaded, self._found.model_version, origin, found, stamps)
        return self._new_version(entry.install, entry.discard)

    def _check_room(self) -> None:
        needed, advice = 0, ""
        if self.manner == "beside":
            needed = self.weights_bytes
            advice = "load it with swap_mode stream, which pauses serving, "
        if not self._loaded.plan.budget.is_gpu:
            needed += spare_bytes(self._found.decoder)
        self._loaded.check_room(needed, f"version {self.name} of {self.root}", advice=advice)

    def _new_version(
        self, install: Callable[[Engine], None], discard: Callable[[], None]
    ) -> NewVersion:
        return NewVersion(
            model_version=self._found.model_version,
            manner=self.manner,
            root=self.root,
            generation_config=self._found.checkpoint.generation_config,
            max_model_len=self._loaded.plan.max_model_len,
            vocab_size=self._found.decoder.config.vocab_size,
            weights_bytes=self.weights_bytes,
            lines=self.lines,
            install=install,
            discard=discard,
        )


class _Beside:
    """What `install` and `discard` of manner `beside` do, once."""

    def __init__(
        self,
        loaded: LoadedVersions,
        version: ModelVersion,
        params: Params,
        origin: Origin,
        placed: PlacedTensors,
    ):
        self._loaded, self._version, self._origin = loaded, version, origin
        self._params: Params | None = params
        self._placed = placed
        self._turn = threading.Lock()  # an engine that was slow may install what is discarded

    def install(self, engine: Engine) -> None:
        if self._loaded.runner.is_closed:
            raise Conflict(
                f"the engine that version {self._version.name} was loaded for is gone; load it "
                "again, with an engine of its own"
            )
        params = self._take()
        if params is None:
            raise Conflict(f"version {self._version.name} was installed or discarded before")
        self._loaded.add(self._version.name, params, self._origin)
        self._loaded.settle(self._placed)
        _enter(engine, self._version)

    def discard(self) -> None:
        if self._take() is not None:
            self._placed.free()
            self._loaded.settle(self._placed)

    def _take(self) -> Params | None:
        """Whoever is first has them."""
        with self._turn:
            params, self._params = self._params, None
        return params


class _InPlace:
    """The same of manner `stream`. Owns the checkpoint."""

    def __init__(
        self,
        loaded: LoadedVersions,
        version: ModelVersion,
        origin: Origin,
        checkpoint: Checkpoint,
        stamps: FileStamps,
    ):
        self._loaded, self._version, self._origin = loaded, version, origin
        self._checkpoint, self._stamps = checkpoint, stamps

    def install(self, engine: Engine) -> None:
        """See `NewVersion`.

        Raises: Conflict if sequences live, CheckpointError for a file that was written since:
            nothing has changed then. What reading raises: the version before was read again.
            EngineFailure if that could not be: there are no weights, only a restart helps.
        """
        if engine.has_requests:
            raise Conflict("expected no live request while weights are replaced; drain first")
        with closing(self._checkpoint):
            self._stamps.check()
            before, runner = engine.version, self._loaded.runner
            origin = self._loaded.origin_of(before)
            params = runner.take_version(before)
            try:
                stream_weights(params, self._checkpoint, self._origin.decoder)
                self._stamps.check()
            except BaseException as error:
                _read_again(params, before, origin, error)
                runner.add_version(before, params)
                raise
        self._loaded.add(self._version.name, params, self._origin)
        _enter(engine, self._version)
        if self._version.name != before:
            engine.serve_version(self._version.name)
            engine.drop_version(before)

    def discard(self) -> None:
        self._checkpoint.close()


def _enter(engine: Engine, version: ModelVersion) -> None:
    """If it is not there, to be replaced."""
    if version.name not in engine.versions:
        engine.add_version(version)
    elif not engine.takes_version(version.name):
        engine.take_back_version(version)


def _read_again(params: Params, version: str, origin: Origin, error: BaseException) -> None:
    """What was current, after `error` has left a mixture. Raises: EngineFailure."""
    log.error("the weights of %s are read again, after: %s", version, error)
    try:
        with closing(origin.opened()) as checkpoint:
            stream_weights(params, checkpoint, origin.decoder)
    except Exception as failure:
        for array in jax.tree.leaves(params):
            array.delete()
        raise EngineFailure(
            f"the weights are lost: another version could not be read ({error}), and "
            f"{version} could not be read again ({failure}); restart the server"
        ) from error


def spare_bytes(decoder: Decoder) -> int:
    """What loading needs on the host, at once, beside the weights that it has placed."""
    leaves = jax.tree.leaves(decoder.param_shapes)
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return largest + 2 * CHUNK_BYTES
