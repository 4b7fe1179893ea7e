"""The weights of a folder in orbax's form: config.json and tokenizer as Hugging Face's, and the
tensors in the sub-folder `orbax`.

Orbax brings JAX along, so it is imported where such a folder is opened or written, and only there.
Its arrays are compressed: a tensor is read as a whole, not mapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.errors import CheckpointError, first_line
from checkpoints.source import TensorInfo

if TYPE_CHECKING:
    from orbax.checkpoint import Checkpointer

ORBAX_FOLDER = "orbax"
MARK = "_METADATA"  # of orbax, in every checkpoint of its own
NOT_CONTENT = ("_CHECKPOINT_METADATA", "commit_success.txt")  # times and places of the writing


class OrbaxSource:
    """A `TensorSource` over an orbax checkpoint of arrays; keys of nested dicts are joined by dots.

    The last tensor that was read is held.
    Raises: CheckpointError for what orbax does not read.
    """

    def __init__(self, folder: Path):
        self._path = (folder / ORBAX_FOLDER).absolute()
        self._checkpointer: Checkpointer = _checkpointer()
        try:
            tree: Any = self._checkpointer.metadata(self._path).item_metadata
            self._infos = {
                ".".join(keys): (keys, leaf, _info(".".join(keys), leaf))
                for keys, leaf in _leaves(tree.tree, ())
            }
        except Exception as error:  # orbax and what it reads with raise nothing narrower
            raise CheckpointError(
                f"{self._path}: expected an orbax checkpoint of arrays, found "
                f"{type(error).__name__}: {first_line(error)}"
            ) from None
        self._last: tuple[str, np.ndarray] | None = None

    def names(self) -> Sequence[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._known(name)[2]

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        if self._last is None or self._last[0] != name:
            self._last = name, self._restored(name)
        tensor = self._last[1]
        return tensor if slices is None else tensor[slices]

    def close(self) -> None:
        self._last = None
        self._infos = {}
        self._checkpointer.close()

    def _known(self, name: str) -> tuple[tuple[str, ...], Any, TensorInfo]:
        found = self._infos.get(name)
        if found is None:
            raise CheckpointError(f"{self._path}: expected a tensor {name!r}, found none")
        return found

    def _restored(self, name: str) -> np.ndarray:
        from orbax.checkpoint import RestoreArgs
        from orbax.checkpoint.args import PyTreeRestore

        keys, leaf, info = self._known(name)
        wanted = PyTreeRestore(
            item=_nested(keys, leaf),
            restore_args=_nested(keys, RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        try:
            found = self._checkpointer.restore(self._path, args=wanted)
            for key in keys:
                found = found[key]
            if (found.shape, found.dtype) != (info.shape, info.dtype):
                raise ValueError(f"{found.dtype} {found.shape}")
        except Exception as error:  # as above
            raise CheckpointError(
                f"{self._path}: tensor {name!r}: expected {info.dtype} {info.shape}, found "
                f"{type(error).__name__}: {first_line(error)}"
            ) from None
        found.flags.writeable = False
        return found


def is_orbax(folder: Path) -> bool:
    """Whether the weights of a folder with a config.json are orbax's."""
    return (folder / ORBAX_FOLDER / MARK).is_file()


def orbax_files(folder: Path) -> list[Path]:
    """Those that are the same for the same tensors, sorted."""
    found = (folder / ORBAX_FOLDER).rglob("*")
    return sorted(path for path in found if path.is_file() and path.name not in NOT_CONTENT)


def write_arrays(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """The sub-folder `orbax`, a file for each tensor. Raises: OSError or ValueError."""
    with _checkpointer() as checkpointer:
        checkpointer.save((folder / ORBAX_FOLDER).absolute(), dict(tensors))


def _checkpointer() -> Checkpointer:
    from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

    return Checkpointer(PyTreeCheckpointHandler(use_ocdbt=False))


def _leaves(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(tree, Mapping):
        yield keys, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, (*keys, str(key)))


def _nested(keys: tuple[str, ...], leaf: Any) -> dict[str, Any]:
    for key in reversed(keys):
        leaf = {key: leaf}
    return leaf


def _info(name: str, leaf: Any) -> TensorInfo:
    dtype, shape = np.dtype(leaf.dtype), tuple(map(int, leaf.shape))
    return TensorInfo(name, shape, dtype, math.prod(shape) * dtype.itemsize)
