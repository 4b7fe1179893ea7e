"""The weights of a Hugging Face folder: one `model.safetensors`, or shards by an index.

The safetensors package checks each header (lengths, offsets, dtypes, no holes) before anything is
mapped; tensors are then views of the mapped file. Knows nothing of config.json or tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.errors import CheckpointError, first_line
from checkpoints.file_bytes import FileBytes, check_small
from checkpoints.source import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAME = 255  # of a file

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    info: TensorInfo
    start: int  # bytes from the start of the file


class SafetensorsSource:
    """A `TensorSource` over the safetensors files of one folder.

    Args:
        is_mapped: as file_bytes.py says; where not, `read` gives fresh arrays.
    Raises: CheckpointError for missing, truncated or inconsistent files, naming the file.
    """

    def __init__(self, folder: Path, *, is_mapped: bool = True) -> None:
        self._folder = folder
        self._is_mapped = is_mapped
        self._bytes: dict[Path, np.ndarray | FileBytes] = {}
        self._entries: dict[str, _Entry] = {}
        for path in weight_files(folder):
            self._add(path)
        if not (folder / SINGLE_FILE).is_file():
            _check_index(folder, self._entries)

    def _add(self, path: Path) -> None:
        for name, entry in _entries(path).items():
            earlier = self._entries.setdefault(name, entry)
            if earlier is not entry:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is also in {earlier.file.name}, expected it once"
                )
        if self._is_mapped:
            self._bytes[path] = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        else:
            self._bytes[path] = FileBytes(path)

    def names(self) -> Sequence[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        return self._entry(name).info

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        entry = self._entry(name)
        info, file = entry.info, self._bytes[entry.file]
        if not slices or slices[0].step not in (None, 1) or not info.nbytes:
            raw = file[entry.start : entry.start + info.nbytes]
            tensor = raw.view(info.dtype).reshape(info.shape)
            return tensor if slices is None else tensor[slices]
        first, last, _ = slices[0].indices(info.shape[0])
        num_rows, row_bytes = max(0, last - first), info.nbytes // info.shape[0]
        start = entry.start + first * row_bytes
        rows = file[start : start + num_rows * row_bytes].view(info.dtype)
        rows = rows.reshape(num_rows, *info.shape[1:])
        return rows[(slice(None), *slices[1:])] if slices[1:] else rows

    def close(self) -> None:
        for file in self._bytes.values():
            if isinstance(file, FileBytes):
                file.close()
        self._bytes.clear()
        self._entries.clear()

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._folder}: expected a tensor {name!r}, found none")
        return entry


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the folder's weights, sorted by name.

    Raises: CheckpointError if there are none, or a shard that the index names is missing.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():  # as transformers does where a folder has both
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found {_weights_found(folder)}"
        )
    files = [folder / name for name in sorted(set(_weight_map(index).values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: expected {len(files)} shards, found {len(files) - len(missing)}; "
            f"missing: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        )
    return files


def infos_of(path: Path) -> list[TensorInfo]:
    """Of the tensors of one file. Raises: CheckpointError."""
    return [entry.info for entry in _entries(path).values()]


def _weights_found(folder: Path) -> str:
    kinds = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
    found = sorted(path.name for path in folder.iterdir() if path.suffix in kinds)
    return f"only {', '.join(found[:5])}" if found else "no weights"


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name, each a plain name in the index's own folder."""
    check_small(index)
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        good = isinstance(weight_map, dict) and all(
            isinstance(file, str) for file in weight_map.values()
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: expected JSON with a 'weight_map', found {first_line(error)}"
        ) from None
    if not good or not weight_map:
        raise CheckpointError(f"{index}: expected 'weight_map' to map tensor names to file names")
    for file in weight_map.values():
        if not file or Path(file).name != file or len(file) > MAX_NAME:
            raise CheckpointError(
                f"{index}: expected file names without a folder, found {file!r:.100}"
            )
    return weight_map


def _check_index(folder: Path, entries: dict[str, _Entry]) -> None:
    index = folder / INDEX_FILE
    for name, file in _weight_map(index).items():
        entry = entries.get(name)
        if entry is None or entry.file.name != file:
            where = "no shard has it" if entry is None else f"it is in {entry.file.name}"
            raise CheckpointError(f"{index}: expected tensor {name!r} in {file}, but {where}")


def _entries(path: Path) -> dict[str, _Entry]:
    header, data_start = _read_header(path)
    entries: dict[str, _Entry] = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES.get(fields["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {fields['dtype']}, "
                f"expected one of {', '.join(DTYPES)}"
            )
        begin, end = fields["data_offsets"]
        info = TensorInfo(name, tuple(fields["shape"]), dtype, end - begin)
        entries[name] = _Entry(path, info, data_start + begin)
    return entries


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, after the package has found it sound, and where the data starts."""
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, found {size} bytes that are not: "
            f"{first_line(error)}"
        ) from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return header, 8 + length
