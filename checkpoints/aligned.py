"""Host arrays that a device may take over as they are, and pieces to fill them by."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from checkpoints.source import TensorInfo

CHUNK_BYTES = 8 << 20  # converted at once; what a conversion needs besides its result
ALIGNMENT = 64  # bytes; XLA's CPU client takes a host array so aligned without another copy


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As np.empty."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def row_chunks(info: TensorInfo) -> Iterator[slice]:
    """Rows of a tensor, about CHUNK_BYTES of the source at a time."""
    row_bytes = max(1, info.nbytes // max(1, info.shape[0]))
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, info.shape[0], step):
        yield slice(start, min(start + step, info.shape[0]))
