"""The weights of a folder in orbax's form: config.json and tokenizer as Hugging Face's, and the
tensors in the sub-folder `orbax`.

Read by tensorstore, which is what orbax keeps arrays in; orbax brings JAX along, and is imported
where such a folder is written, and only there. Arrays are compressed: read, not mapped.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from checkpoints.errors import CheckpointError, first_line
from checkpoints.file_bytes import check_small
from checkpoints.source import TensorInfo

if TYPE_CHECKING:
    import tensorstore as ts
    from orbax.checkpoint import Checkpointer

ORBAX_FOLDER = "orbax"
MARK = "_METADATA"  # of orbax, in every checkpoint of its own
NOT_CONTENT = ("_CHECKPOINT_METADATA", "commit_success.txt")  # times and places of the writing


class OrbaxSource:
    """A `TensorSource` over an orbax checkpoint of arrays; keys of nested dicts are joined by dots.

    Sharded or not, in one file for each chunk or in a database (OCDBT). Whole chunks are read, and
    each thread holds the last.
    Raises: CheckpointError for what tensorstore does not read.
    """

    def __init__(self, folder: Path):
        self._path = (folder / ORBAX_FOLDER).absolute()
        self._held = threading.local()
        try:
            check_small(self._path / MARK)
            opened = {name: open_.result() for name, open_ in _opening(self._path).items()}
            self._stores = {name: (store, _info(name, store)) for name, store in opened.items()}
        except Exception as error:  # tensorstore raises nothing narrower
            raise CheckpointError(
                f"{self._path}: expected an orbax checkpoint of arrays, found "
                f"{type(error).__name__}: {first_line(error)}"
            ) from None

    def names(self) -> Sequence[str]:
        return list(self._stores)

    def info(self, name: str) -> TensorInfo:
        return self._known(name)[1]

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        info = self.info(name)
        if not info.shape:
            return self._rows(name, 0, 0)
        first, last, step = (slices[0] if slices else slice(None)).indices(info.shape[0])
        if step != 1:
            return self._rows(name, 0, info.shape[0])[slices]
        rows = self._rows(name, first, max(first, last))
        return rows[(slice(None), *slices[1:])] if slices and slices[1:] else rows

    def close(self) -> None:
        self._held = threading.local()
        self._stores = {}

    def _known(self, name: str) -> tuple[ts.TensorStore, TensorInfo]:
        found = self._stores.get(name)
        if found is None:
            raise CheckpointError(f"{self._path}: expected a tensor {name!r}, found none")
        return found

    def _rows(self, name: str, first: int, last: int) -> np.ndarray:
        """A read-only view of rows of the first axis, out of whole chunks."""
        held: tuple[str, int, np.ndarray] | None = getattr(self._held, "rows", None)
        if held is None or held[0] != name or not held[1] <= first <= last <= _end(held):
            store, info = self._known(name)
            held = self._held.rows = name, *self._chunks(store, info, first, last)
        _, start, rows = held
        return rows[first - start : last - start] if rows.ndim else rows

    def _chunks(
        self, store: ts.TensorStore, info: TensorInfo, first: int, last: int
    ) -> tuple[int, np.ndarray]:
        """Those that the rows are in: the number of their first row, and their rows."""
        try:
            start = 0
            if info.shape:
                step = max(1, _chunk(store)[0])
                start = first // step * step
                store = store[start : min(-(-last // step) * step, info.shape[0])]
            found: np.ndarray = store.read().result()
        except Exception as error:  # as above
            raise CheckpointError(
                f"{self._path}: tensor {info.name!r}: expected {info.dtype} {info.shape}, found "
                f"{type(error).__name__}: {first_line(error)}"
            ) from None
        found.flags.writeable = False
        return start, found


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


def _opening(path: Path) -> dict[str, ts.Future[ts.TensorStore]]:
    """By name, all at once: each reads a small file, or a part of the database."""
    import tensorstore as ts

    head = json.loads((path / MARK).read_bytes())
    is_database = head.get("use_ocdbt", True)
    form = {
        "driver": "zarr3" if head.get("use_zarr3") else "zarr",
        # A chunk that is not there is a fault, where zeros are written as others are.
        "fill_missing_data_reads": not head.get("store_array_data_equal_to_fill_value"),
    }
    found: dict[str, ts.Future[ts.TensorStore]] = {}
    for entry in head["tree_metadata"].values():
        name = ".".join(str(part["key"]) for part in entry["key_metadata"])
        if entry["value_metadata"].get("skip_deserialize"):  # an empty dict or None
            continue
        if "/" in name or "\0" in name or name.strip(".") == "" or name in found:
            raise ValueError(f"the name {name!r:.100}, or it twice")
        file = {"driver": "file", "path": f"{path}/" if is_database else f"{path / name}/"}
        kept = {"driver": "ocdbt", "base": file, "path": f"{name}/"} if is_database else file
        found[name] = ts.open(form | {"kvstore": kept}, open=True, read=True)
    return found


def _end(held: tuple[str, int, np.ndarray]) -> int:
    """One past the last row."""
    return held[1] + (len(held[2]) if held[2].ndim else 0)


def _chunk(store: ts.TensorStore) -> tuple[int, ...]:
    """Elements of it along each axis."""
    return tuple(size or 1 for size in store.chunk_layout.read_chunk.shape or ())


def _info(name: str, store: ts.TensorStore) -> TensorInfo:
    dtype, shape = np.dtype(store.dtype.numpy_dtype), tuple(map(int, store.shape))
    chunk = _chunk(store)
    if any(size > max(1, whole) for size, whole in zip(chunk, shape, strict=True)):
        raise ValueError(f"chunks of {chunk} in tensor {name!r:.100} of {shape}")
    return TensorInfo(name, shape, dtype, math.prod(shape) * dtype.itemsize)
