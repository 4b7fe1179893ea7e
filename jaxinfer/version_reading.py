"""A version's files while they are read: with rests, until it is given up, and nothing of it stays
on the device if that fails.
"""

from __future__ import annotations

import threading

from checkpoints.checksums import check_sums
from checkpoints.file_stamps import FileStamps
from jaxinfer.errors import Conflict
from jaxinfer.found_model import FoundModel
from jaxinfer.loaded_versions import LoadedVersions, PlacedTensors
from jaxinfer.runtime.pace import Pace
from jaxinfer.runtime.steps import Params
from jaxinfer.runtime.weights import load_weights


class VersionReading:
    """Of one that was found. Owns its checkpoint until it `begins`; then that is the caller's.

    Raises: CheckpointError for a file that is gone.
    """

    def __init__(self, found: FoundModel):
        self._found = found
        self.stamps = FileStamps(found.checkpoint.files)
        self._is_given_up = threading.Event()
        self._has_begun = False
        self._pace = Pace()

    def begin(self) -> None:
        """On the thread that reads."""
        self._has_begun = True

    def give_up(self) -> None:
        """On any thread; may be called again."""
        self._is_given_up.set()
        if not self._has_begun:
            self._found.checkpoint.close()

    def go_on(self) -> None:
        """Between two pieces of work. Raises: Conflict if it was given up."""
        if self._is_given_up.is_set():
            raise Conflict(f"version {self._found.version} was given up while it was read")
        self._pace.rest()

    def compare_checksums(self) -> None:
        """Raises: CheckpointError as `check_sums`; Conflict."""
        check_sums(self._found.checkpoint.path, self.go_on)

    def place(self, loaded: LoadedVersions) -> tuple[Params, PlacedTensors]:
        """All weights to the device; the caller settles them.

        Raises: CheckpointError for weights that are damaged, or were written meanwhile; Conflict.
        """
        placed = loaded.begin()
        try:
            params = load_weights(
                self._found.checkpoint,
                self._found.decoder,
                on_tensor=self.go_on,
                put=placed.put,
                is_in_background=True,
            )
            self.stamps.check()
        except BaseException:
            placed.free()
            loaded.settle(placed)
            raise
        return params, placed
