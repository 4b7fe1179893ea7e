"""What a quantized product of another tool is, whatever its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats import GROUP_SIZES, WeightFormat
from checkpoints.source import TensorInfo, TensorSource

SCALE_DTYPES = ("float16", "bfloat16", "float32")


class PackedProduct(Protocol):
    """One weight [N, K], of which rows can be read alone. Values: checkpoints/qtensor.py's."""

    kept: WeightFormat
    shape: tuple[int, int]

    @property
    def order(self) -> np.ndarray | None:
        """int32[K]: the input that each column of q is of; None: 0 to K - 1."""
        ...

    def q(self, rows: slice) -> np.ndarray:
        """int8[n, K], one integer each."""
        ...

    def scale(self, rows: slice) -> np.ndarray:
        """float32[G, n]."""
        ...

    def zero(self, rows: slice) -> np.ndarray:
        """int8[G, n], of a format that has zero points."""
        ...


class Method(Protocol):
    """What config.json says of all products."""

    @property
    def kept(self) -> WeightFormat:
        """Their format, in the order of their inputs."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Last parts of names: a tensor so called belongs to a quantized product."""
        ...

    def product(self, tensors: Tensors) -> PackedProduct:
        """Raises: CheckpointError for parts that are missing or do not fit together."""
        ...


@dataclass(frozen=True, slots=True)
class Tensors:
    """The parts of one product."""

    source: TensorSource
    name: str  # without the last part
    infos: Mapping[str, TensorInfo]  # by the last part of their names
    file: str

    def info(self, part: str, dtypes: tuple[str, ...], num_axes: int = 2) -> TensorInfo:
        """Raises: CheckpointError if there is no such part, or it is none of these dtypes."""
        info = self.infos.get(part)
        if info is None:
            raise CheckpointError(
                f"{self.file}: expected a tensor {f'{self.name}.{part}'!r}, found none"
            )
        if info.dtype.name not in dtypes or len(info.shape) != num_axes:
            raise self.error(part, f"{' or '.join(dtypes)} of {num_axes} axes")
        return info

    def check_shape(self, part: str, shape: tuple[int, ...]) -> None:
        if self.infos[part].shape != shape:
            raise self.error(part, f"shape {shape}")

    def read(self, part: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        return self.source.read(f"{self.name}.{part}", slices)

    def error(self, part: str, expected: str) -> CheckpointError:
        info = self.infos[part]
        return CheckpointError(
            f"{self.file}: tensor {info.name!r} is {info.dtype} {info.shape}, expected {expected}"
        )


def whole_number(config: Mapping[str, Any], key: str, allowed: tuple[int, ...], file: str) -> int:
    """Raises: CheckpointError if it is none of `allowed`."""
    value = config.get(key)
    if isinstance(value, bool) or value not in allowed:
        raise CheckpointError(
            f"{file}: expected {key} in quantization_config to be "
            f"{' or '.join(map(str, allowed))}, found {value!r:.60}"
        )
    return int(value)


def group_size(config: Mapping[str, Any], key: str, file: str) -> int | None:
    """None: one scale per output."""
    size = whole_number(config, key, (*GROUP_SIZES, -1), file)
    return None if size == -1 else size


def input_order(
    tensors: Tensors, part: str, num_inputs: int, group_size: int | None
) -> np.ndarray | None:
    """int32[K]: which inputs come one after the other if those of a group shall; None: they do.

    part: int32[K], the group of each input, which the product may lack.
    Raises: CheckpointError if groups have other sizes.
    """
    if part not in tensors.infos:
        return None
    tensors.info(part, ("int32",), 1)
    tensors.check_shape(part, (num_inputs,))
    groups = np.asarray(tensors.read(part))
    expected = np.arange(num_inputs) // (group_size or num_inputs)
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if not np.array_equal(groups[order], expected):
        raise tensors.error(part, f"groups of {group_size or num_inputs} inputs each, from 0 on")
    return order


def unpacked(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """uint8: the 32/bits integers of each int32 [A, B], lowest bits first, along `axis`."""
    words = np.ascontiguousarray(packed).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = ((words[..., None] >> shifts) & np.uint32(2**bits - 1)).astype(np.uint8)
    height, width = packed.shape
    if axis == 0:
        return np.moveaxis(parts, -1, 1).reshape(height * len(shifts), width)
    return parts.reshape(height, width * len(shifts))
