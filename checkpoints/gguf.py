"""A GGUF file, or the parts of a split one, as a `TensorSource`: names translated, q/k rows put
back, blocks dequantized, experts laid one under the other, the 1 in Gemma's norms taken out.

Rows are dequantized as they are read, never the whole file. Block formats are the gguf package's
business. llama-family converters store the rows of q and k for the interleaved rotary form (pairs
2i, 2i+1); Hugging Face's models rotate halves, so the rows are put back in that order here.
Products that are fused in the file stay so (layout.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.errors import CheckpointError
from checkpoints.file_bytes import FileBytes
from checkpoints.gguf_config import hf_config
from checkpoints.gguf_header import GGUFTensor
from checkpoints.gguf_names import Architecture, architecture_of
from checkpoints.gguf_parts import GGUFPart, read_parts
from checkpoints.gguf_rope import ROPE_TENSORS
from checkpoints.source import TensorInfo

PLAIN_DTYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
PIECE = 1 << 17  # elements dequantized at once


@dataclass(frozen=True, slots=True)
class _Entry:
    file: int  # which of the files it is in
    tensor: GGUFTensor
    info: TensorInfo
    rows: np.ndarray | None  # int[out]: row of the file for each of our rows; None: the same
    is_offset: bool  # the file holds 1 + ours


class GGUFSource:
    """A `TensorSource` over one GGUF model, with its metadata.

    Args:
        path: the file, or any part of a split one.
        is_mapped: as file_bytes.py says; where not, `read` gives fresh arrays.
    Attributes:
        path: the file; of a split one, its first part.
        files: all of them.
        metadata: the first file's own keys and values (see `GGUFHeader`).
        config: the same as Hugging Face config keys.

    Raises: CheckpointError for a damaged file, an unknown architecture or block type, parts that do
        not belong together.
    """

    def __init__(self, path: Path, *, is_mapped: bool = True) -> None:
        parts = read_parts(path)
        self.path = parts[0].path
        self.files = tuple(part.path for part in parts)
        self.metadata: dict[str, Any] = parts[0].header.metadata
        architecture = architecture_of(self.path, self.metadata)
        _check_block_types(parts)
        self.config: dict[str, Any] = hf_config(
            self.path,
            self.metadata,
            {name: t.shape for part in parts for name, t in part.header.tensors.items()},
            rope_tensors=_rope_tensors(parts),
        )
        self._bytes: list[np.ndarray | FileBytes] = [
            part.mapped if is_mapped else FileBytes(part.path) for part in parts
        ]
        self._entries = {
            architecture.hf_name(name): _entry(file, tensor, architecture, self.config)
            for file, part in enumerate(parts)
            for name, tensor in part.header.tensors.items()
            if name not in ROPE_TENSORS
        }

    def names(self) -> Sequence[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        return self._entry(name).info

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        entry = self._entry(name)
        file = self._bytes[entry.file]
        first, rest = (slice(None), ()) if not slices else (slices[0], slices[1:])
        tensor = entry.tensor
        if len(tensor.shape) == 1:
            vector = _rows(file, tensor)
            vector = vector if entry.rows is None else vector[entry.rows]
            return (vector - vector.dtype.type(1) if entry.is_offset else vector)[first]
        part = _rows(file, tensor, first if entry.rows is None else entry.rows[first])
        return part[(slice(None), *rest)] if rest else part

    def close(self) -> None:
        for file in self._bytes:
            if isinstance(file, FileBytes):
                file.close()
        self._bytes.clear()
        self._entries.clear()

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: expected a tensor {name!r}, found none")
        return entry


def _check_block_types(parts: Iterable[GGUFPart]) -> None:
    """Try each type that occurs on one block, so that a file fails when it is opened."""
    seen: set[GGMLQuantizationType] = set(PLAIN_DTYPES)
    for part in parts:
        for tensor in part.header.tensors.values():
            if tensor.type not in seen:
                _check_block_type(part.path, tensor)
                seen.add(tensor.type)


def _check_block_type(path: Path, tensor: GGUFTensor) -> None:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
    except NotImplementedError:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} has block type {tensor.type.name}, "
            f"which the gguf package cannot dequantize"
        ) from None


def _rope_tensors(parts: Iterable[GGUFPart]) -> dict[str, np.ndarray]:
    return {
        name: _rows(part.mapped, part.header.tensors[name]).reshape(-1)
        for part in parts
        for name in ROPE_TENSORS
        if name in part.header.tensors
    }


def _entry(
    file: int, tensor: GGUFTensor, architecture: Architecture, config: Mapping[str, Any]
) -> _Entry:
    dtype = PLAIN_DTYPES.get(tensor.type, np.dtype(np.float32))
    name, given = architecture.hf_name(tensor.name), tensor.name
    tensor = replace(tensor, shape=_flat(name, tensor.shape))
    heads = architecture.permuted_heads(given, config) if tensor.nbytes else ()
    rows = _unpermuted(tensor.shape[0], heads, config["head_dim"]) if heads else None
    info = TensorInfo(name, tensor.shape, dtype, math.prod(tensor.shape) * dtype.itemsize)
    return _Entry(file, tensor, info, rows, architecture.is_offset(given))


def _flat(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The rows of all experts under one another; a gate of one row is a matrix here."""
    if ".mlp.experts." in name and len(shape) == 3:
        return (shape[0] * shape[1], shape[2])
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        return (1, *shape)
    return shape


def _unpermuted(num_rows: int, heads: Sequence[int], head_dim: int) -> np.ndarray:
    """int[out]: the row in the file ([head, pair, half]) of each row of ours ([head, half, pair]).

    Args:
        heads: of each product, from the first row on; rows after them are in place.
    A number of rows that does not fit is left to the shape check of the loader.
    """
    rows, start = np.arange(num_rows), 0
    for count in heads:
        size = num_rows if len(heads) == 1 else count * head_dim
        if start + size > num_rows or size % (2 * count):
            return np.arange(num_rows)
        part = rows[start : start + size].reshape(count, -1, 2).swapaxes(1, 2)
        rows[start : start + size] = part.reshape(-1)
        start += size
    return rows


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
