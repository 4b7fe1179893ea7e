"""What every weight file looks like from outside, whatever its format.

Speaks Hugging Face tensor names and the [out, in] layout; knows no model and no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from checkpoints.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor, known from the header alone."""

    name: str  # Hugging Face's, e.g. "model.layers.0.self_attn.q_proj.weight"
    shape: tuple[int, ...]  # [out, in] for a matrix
    dtype: np.dtype  # of what read() returns
    nbytes: int  # of what read() returns for the whole tensor


class TensorSource(Protocol):
    """A set of named tensors, read one at a time.

    Opening has already checked that every tensor lies inside its file, so that `info` cannot fail
    for a name out of `names()` and `read` touches only the bytes it returns.
    """

    def names(self) -> Sequence[str]:
        """All tensor names, each once, in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype. Raises: CheckpointError if there is no such tensor."""
        ...

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the part of it that `slices` (one per leading axis) select.

        Where no conversion is needed this is a read-only view of the mapped file: copy what must
        outlive a change of the file on disk. Several threads may read at once.
        Raises: CheckpointError if there is no such tensor.
        """
        ...

    def close(self) -> None:
        """Let go of the files; views that `read` gave out keep their mapping alive. Idempotent."""
        ...


class DerivedSource:
    """What a `TensorSource` over another has in any case; `read` is its own.

    Args:
        source: the other, closed with this one.
        infos: by name, in order, of what `read` gives.
        file: what error messages call the source.
    """

    def __init__(self, source: TensorSource, infos: Mapping[str, TensorInfo], file: str) -> None:
        self._source, self._infos, self._file = source, infos, file

    def names(self) -> Sequence[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"{self._file}: expected a tensor {name!r}, found none")
        return info

    def close(self) -> None:
        self._source.close()
