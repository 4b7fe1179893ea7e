"""The tensors of a source under the names that models here have: fused products cut into theirs,
those of experts laid one under the other.

A product is cut or joined at its outputs, whatever it is kept as: rows of `weight`, `bias` and `q`,
columns of `scale` and `zero` (qtensor.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.source import DerivedSource, TensorInfo, TensorSource

BY_COLUMNS = (".scale", ".zero")  # the last parts of names whose outputs are on the second axis


@dataclass(frozen=True, slots=True)
class Cut:
    """Outputs first to last (exclusive) of a tensor."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The outputs of several tensors in their order."""

    names: tuple[str, ...]


class ArrangedSource(DerivedSource):
    """A `TensorSource` over another, of which it keeps what `parts` does not take.

    Args:
        parts: our name -> what of the other source's it is.
        file: what error messages call the source.
    Raises: CheckpointError if a part reaches beyond its tensor, or parts that belong together have
        different shapes or dtypes.
    """

    def __init__(
        self, source: TensorSource, parts: Mapping[str, Cut | Joined], *, file: str
    ) -> None:
        infos: dict[str, TensorInfo] = {}
        super().__init__(source, infos, file)
        self._parts = dict(parts)
        taken = {name for part in parts.values() for name in _names(part)}
        kept = [name for name in source.names() if name not in taken]
        infos |= {name: source.info(name) for name in kept}
        infos |= {name: self._info(name, part) for name, part in parts.items()}

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        info, part = self.info(name), self._parts.get(name)
        if part is None:
            return self._source.read(name, slices)
        axis = _axis(name)
        wanted = [slice(None)] * len(info.shape)
        wanted[: len(slices or ())] = slices or ()
        outputs = wanted[axis].indices(info.shape[axis])
        if isinstance(part, Cut):
            first, last, step = outputs
            wanted[axis] = _from(part.first + first, part.first + last, step)
            return self._source.read(part.name, tuple(wanted))
        return self._read_joined(part, wanted, axis, range(*outputs))

    def _read_joined(
        self, part: Joined, wanted: list[slice], axis: int, outputs: range
    ) -> np.ndarray:
        assert outputs.step == 1, "joined tensors are read forwards, without gaps"
        pieces, start = [], 0
        for name in part.names:
            size = self._source.info(name).shape[axis]
            first, last = max(outputs.start - start, 0), min(outputs.stop - start, size)
            if first < last or (not outputs and not pieces):
                wanted[axis] = slice(first, max(first, last))
                pieces.append(self._source.read(name, tuple(wanted)))
            start += size
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)

    def _info(self, name: str, part: Cut | Joined) -> TensorInfo:
        axis, infos = _axis(name), [self._source.info(each) for each in _names(part)]
        first = infos[0]
        if len(first.shape) <= axis:
            raise self._error(first, f"at least {axis + 1} axes")
        for other in infos[1:]:
            same = (_without(first.shape, axis), first.dtype)
            if (_without(other.shape, axis), other.dtype) != same:
                raise self._error(other, f"{first.dtype} and the other axes of {first.name!r}")
        if isinstance(part, Cut):
            size = part.last - part.first
            if part.last > first.shape[axis]:
                raise self._error(first, f"at least {part.last} outputs")
        else:
            size = sum(info.shape[axis] for info in infos)
        shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
        return replace(first, name=name, shape=shape, nbytes=_nbytes(shape, first.dtype))

    def _error(self, info: TensorInfo, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: tensor {info.name!r} is {info.dtype} {info.shape}, expected {expected}"
        )


def _names(part: Cut | Joined) -> tuple[str, ...]:
    return (part.name,) if isinstance(part, Cut) else part.names


def _axis(name: str) -> int:
    """Of the outputs."""
    return 1 if name.endswith(BY_COLUMNS) else 0


def _from(first: int, last: int, step: int) -> slice:
    """As slice(first, last, step); a reversed one may end at the very start."""
    return slice(first, last if last >= 0 else None, step)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
