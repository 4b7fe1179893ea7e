"""Tensors in memory as a source."""

from __future__ import annotations

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.source import TensorInfo


class Held:
    """A `TensorSource` over arrays."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"held: expected a tensor {name!r}, found none")
        tensor = self._tensors[name]
        return TensorInfo(name, tensor.shape, tensor.dtype, tensor.nbytes)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        return self._tensors[name][slices or ()]

    def close(self) -> None:
        pass
