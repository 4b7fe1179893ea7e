"""The head of a GGUF file: metadata and the table of tensors, with every length checked.

Our own walk, because gguf.GGUFReader trusts lengths and counts (an array that claims 2**60 entries
keeps it busy for ever) and takes seconds on a vocabulary. Types and block sizes come from the gguf
package. Knows no model: names stay as in the file. Format: version 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints.errors import CheckpointError

MAX_STRINGS = 1 << 22  # entries of one array of strings; vocabularies have up to 2**18
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

SCALARS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # of a string, before its bytes


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One line of the tensor table."""

    name: str  # as in the file, e.g. "blk.0.attn_q.weight"
    shape: tuple[int, ...]  # slowest axis first, as numpy has it: [out, in]
    type: GGMLQuantizationType
    start: int  # bytes from the start of the file
    nbytes: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of the last axis, always whole blocks."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All that precedes the tensor data."""

    metadata: dict[str, Any]  # int, float, bool, str, list[str], or a 1-D numpy array
    tensors: dict[str, GGUFTensor]
    data_start: int  # bytes from the start of the file


def read_header(path: Path, mapped: np.ndarray) -> GGUFHeader:
    """Parse and check the head of `mapped`, the file's bytes as uint8[size].

    Raises: CheckpointError naming `path` for anything that is not a whole GGUF file.
    """
    return _Walk(path, mapped).header()


class _Walk:
    """A position in the file that never passes its end."""

    def __init__(self, path: Path, mapped: np.ndarray) -> None:
        self._path = path
        self._data = mapped.data
        self._size = len(mapped)
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._take(4, "magic number") != b"GGUF":
            raise self._error("a GGUF file", "another first four bytes")
        version = self._unpack("<I", "version")
        if version not in (2, 3):
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise self._error("GGUF version 2 or 3", kind)
        num_tensors = self._unpack("<Q", "number of tensors")
        num_fields = self._unpack("<Q", "number of metadata fields")
        metadata = self._metadata(num_fields)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error("general.alignment to be a power of two", repr(alignment))
        table = self._table(num_tensors)
        data_start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, data_start, *line) for name, line in table.items()}
        self._check_apart(tensors)
        return GGUFHeader(metadata, tensors, data_start)

    def _metadata(self, num_fields: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._error(f"metadata {key!r} once", "it twice")
            metadata[key] = self._value(key, self._unpack("<I", key))
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            return self._array(key)
        dtype = self._scalar(key, kind)
        return np.frombuffer(self._take(dtype.itemsize, key), dtype)[0].item()

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind = self._unpack("<I", key)
        count = self._unpack("<Q", key)
        if kind == STRING:
            if count > MAX_STRINGS:
                raise self._error(f"at most {MAX_STRINGS} strings in {key!r}", str(count))
            return self._quick_strings(count) or [self._string(key) for _ in range(count)]
        dtype = self._scalar(key, kind)
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype).copy()

    def _scalar(self, key: str, kind: int) -> np.dtype:
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise self._error(f"metadata {key!r} of a known type", f"type {kind}")
        return dtype

    def _table(self, num_tensors: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Tensor name -> (shape, type number, offset in the data)."""
        table: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string("a tensor name")
            if name in table:
                raise self._error(f"tensor {name!r} once", "it twice")
            num_dims = self._unpack("<I", name)
            if not 1 <= num_dims <= MAX_DIMS:
                raise self._error(f"tensor {name!r} of 1 to {MAX_DIMS} axes", f"{num_dims}")
            dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, name))
            kind = self._unpack("<I", name)
            table[name] = (dims[::-1], kind, self._unpack("<Q", name))
        return table

    def _tensor(
        self, name: str, data_start: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        try:
            block_type = GGMLQuantizationType(kind)
        except ValueError:
            raise self._error(f"tensor {name!r} of a known block type", f"type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[block_type]
        if 0 in shape:
            raise self._error(f"tensor {name!r} with elements", f"axes of {shape}")
        if shape[-1] % block:
            raise self._error(
                f"rows of tensor {name!r} to be multiples of {block} ({block_type.name})",
                f"rows of {shape[-1]}",
            )
        start = data_start + offset
        nbytes = math.prod(shape) // block * block_bytes
        if start + nbytes > self._size:
            raise self._error(
                f"tensor {name!r} at bytes {start} to {start + nbytes}",
                f"a file of {self._size} bytes",
            )
        return GGUFTensor(name, shape, block_type, start, nbytes)

    def _check_apart(self, tensors: dict[str, GGUFTensor]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for one, following in pairwise(in_order):
            if one.start + one.nbytes > following.start:
                raise self._error(
                    f"tensors {one.name!r:.100} and {following.name!r:.100} apart",
                    f"both at byte {following.start}",
                )

    def _quick_strings(self, count: int) -> list[str] | None:
        """The next strings in a tight loop: a vocabulary has 100,000. None if any is not right."""
        data, at, size, strings = self._data, self._at, self._size, list[str]()
        try:
            for _ in range(count):
                (length,) = LENGTH.unpack_from(data, at)
                end = at + LENGTH.size + length
                if end > size:
                    return None
                strings.append(str(data[at + LENGTH.size : end], "utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError):
            return None
        self._at = at
        return strings

    def _string(self, what: str) -> str:
        raw = self._take(self._unpack("<Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self._error(f"UTF-8 in {what!r}", "other bytes") from None

    def _unpack(self, form: str, what: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _take(self, count: int, what: str) -> memoryview:
        end = self._at + count
        if end > self._size:
            raise self._error(
                f"{count} bytes of {what!r} at byte {self._at}", f"a file of {self._size} bytes"
            )
        part = self._data[self._at : end]
        self._at = end
        return part

    def _error(self, expected: str, found: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: expected {expected:.300}, found {found:.300}")
