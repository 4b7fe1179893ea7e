"""A GGUF file as a `TensorSource`: names translated, q/k rows put back, blocks dequantized, the 1
in Gemma's norms taken out.

Rows are dequantized as they are read, never the whole file. Block formats are the gguf package's
business. llama-family converters store the rows of q and k for the interleaved rotary form (pairs
2i, 2i+1); Hugging Face's models rotate halves, so the rows are put back in that order here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.errors import CheckpointError
from checkpoints.file_bytes import FileBytes
from checkpoints.gguf_config import Architecture, architecture_of, hf_config
from checkpoints.gguf_header import GGUFTensor, read_header
from checkpoints.source import TensorInfo

PLAIN_DTYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
PIECE = 1 << 17  # elements dequantized at once
ROPE_FACTORS = "rope_freqs.weight"  # part of the config, not a weight


@dataclass(frozen=True, slots=True)
class _Entry:
    tensor: GGUFTensor
    info: TensorInfo
    rows: np.ndarray | None  # int[out]: row of the file for each of our rows; None: the same
    is_offset: bool  # the file holds 1 + ours


class GGUFSource:
    """A `TensorSource` over one GGUF file, with its metadata.

    Args:
        is_mapped: as file_bytes.py says; where not, `read` gives fresh arrays.
    Attributes:
        path: the file.
        metadata: the file's own keys and values (see `GGUFHeader`).
        config: the same as Hugging Face config keys.

    Raises: CheckpointError for a damaged file, an unknown architecture or block type.
    """

    def __init__(self, path: Path, *, is_mapped: bool = True) -> None:
        self.path = path
        mapped = mapped_file(path)
        header = read_header(path, mapped)
        self.metadata: dict[str, Any] = header.metadata
        architecture = architecture_of(path, header.metadata)
        _check_block_types(path, header.tensors.values())
        factors = header.tensors.get(ROPE_FACTORS)
        self.config: dict[str, Any] = hf_config(
            path,
            header.metadata,
            {name: tensor.shape for name, tensor in header.tensors.items()},
            rope_factors=None if factors is None else _rows(mapped, factors).reshape(-1),
        )
        self._bytes: np.ndarray | FileBytes | None = mapped if is_mapped else FileBytes(path)
        self._entries = {
            entry.info.name: entry
            for entry in (
                _entry(tensor, architecture, self.config)
                for name, tensor in header.tensors.items()
                if name != ROPE_FACTORS
            )
        }

    def names(self) -> Sequence[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        return self._entry(name).info

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        entry = self._entry(name)
        assert self._bytes is not None
        first, rest = (slice(None), ()) if not slices else (slices[0], slices[1:])
        tensor = entry.tensor
        if len(tensor.shape) == 1:
            vector = _rows(self._bytes, tensor)
            vector = vector if entry.rows is None else vector[entry.rows]
            return (vector - vector.dtype.type(1) if entry.is_offset else vector)[first]
        part = _rows(self._bytes, tensor, first if entry.rows is None else entry.rows[first])
        return part[(slice(None), *rest)] if rest else part

    def close(self) -> None:
        if isinstance(self._bytes, FileBytes):
            self._bytes.close()
        self._bytes = None
        self._entries.clear()

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: expected a tensor {name!r}, found none")
        return entry


def mapped_file(path: Path) -> np.ndarray:
    """uint8[size]. Raises: CheckpointError for an empty file, or one that can't be read."""
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: expected a GGUF file, found an empty one")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from None


def _check_block_types(path: Path, tensors: Any) -> None:
    """Try each type that occurs on one block, so that a file fails when it is opened."""
    seen: set[GGMLQuantizationType] = set(PLAIN_DTYPES)
    for tensor in tensors:
        if tensor.type in seen:
            continue
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has block type {tensor.type.name}, "
                f"which the gguf package cannot dequantize"
            ) from None
        seen.add(tensor.type)


def _entry(tensor: GGUFTensor, architecture: Architecture, config: dict[str, Any]) -> _Entry:
    dtype = PLAIN_DTYPES.get(tensor.type, np.dtype(np.float32))
    size = int(np.prod(tensor.shape, dtype=object))
    name = architecture.hf_name(tensor.name)
    num_heads = architecture.permuted_heads(tensor.name, config)
    rows = None if num_heads is None else _unpermuted(tensor.shape[0], num_heads)
    info = TensorInfo(name, tensor.shape, dtype, size * dtype.itemsize)
    return _Entry(tensor, info, rows, architecture.is_offset(tensor.name))


def _unpermuted(num_rows: int, num_heads: int) -> np.ndarray:
    """int[out]: the row in the file ([head, pair, half]) of each row of ours ([head, half, pair]).

    num_rows not being a multiple of 2 * num_heads is left to the shape check of the loader.
    """
    if num_rows % (2 * num_heads):
        return np.arange(num_rows)
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _rows(
    file: np.ndarray | FileBytes, tensor: GGUFTensor, rows: slice | np.ndarray | None = None
) -> np.ndarray:
    """Rows of the first axis: a view for plain types of a mapped file, else fresh, and blocks
    dequantized to float32.
    """
    first, last, rows = _span(rows, tensor.shape[0])
    of_row = tensor.nbytes // max(1, tensor.shape[0])
    raw = file[tensor.start + first * of_row : tensor.start + last * of_row]
    shape = (last - first, *tensor.shape[1:])
    plain = PLAIN_DTYPES.get(tensor.type)
    if plain is not None:
        return raw.view(plain).reshape(shape)[rows]
    part = raw.reshape(*shape[:-1], tensor.row_nbytes)[rows]
    return _dequantized(part, tensor.type).reshape(*part.shape[:-1], tensor.shape[-1])


def _span(rows: slice | np.ndarray | None, num_rows: int) -> tuple[int, int, slice | np.ndarray]:
    """The first of the rows, one past the last, and which they are, from the first on."""
    if isinstance(rows, np.ndarray):
        first, last = (int(rows.min()), int(rows.max()) + 1) if rows.size else (0, 0)
        return first, last, rows - first
    first, last, step = (rows or slice(None)).indices(num_rows)
    if step < 0:
        return 0, num_rows, rows or slice(None)
    return first, max(first, last), slice(None, None, step)


def _dequantized(part: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """float32[blocks, elements of a block], in pieces that stay in the processor's cache.

    The gguf package takes 16 rows at a time; with our pieces as its rows it is five times as fast.
    """
    size, nbytes = GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(part).reshape(-1, nbytes)
    out = np.empty((len(blocks), size), np.float32)
    step = max(1, PIECE // size)
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        out[start : start + step] = dequantize(piece.reshape(1, -1), kind).reshape(-1, size)
    return out
