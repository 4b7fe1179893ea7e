"""Folders of the compressed-tensors library (llm-compressor), in its formats of integers:
`pack-quantized` (4 or 8 bits, 32 bits at a time along the inputs) and `int-quantized` (8 bits).

value[n, k] = (weight[n, k] - weight_zero_point[n, g]) * weight_scale[n, g], of signed integers;
packed ones are kept with half of their range added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats import Activations, WeightFormat
from checkpoints.prequantized.product import (
    SCALE_DTYPES,
    Tensors,
    group_size,
    input_order,
    unpacked,
    whole_number,
)

PACKED, INTEGERS = "pack-quantized", "int-quantized"
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Of a whole folder."""

    kept: WeightFormat
    is_packed: bool
    marks: tuple[str, ...] = PARTS

    @classmethod
    def of(cls, config: Mapping[str, Any], file: str) -> CompressedTensors:
        """Of quantization_config. Raises: CheckpointError for what is not read."""
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            found = len(groups) if isinstance(groups, Mapping) else groups
            raise CheckpointError(
                f"{file}: expected one of config_groups in quantization_config, found {found!r:.60}"
            )
        group = next(iter(groups.values()))
        weights = group.get("weights") if isinstance(group, Mapping) else None
        form = config.get("format") or (group.get("format") if weights else None)
        if form not in (PACKED, INTEGERS) or not isinstance(weights, Mapping):
            raise CheckpointError(
                f"{file}: expected compressed-tensors in format {PACKED} or {INTEGERS}, "
                f"found {form!r:.60}"
            )
        if weights.get("type", "int") != "int":
            raise CheckpointError(
                f"{file}: expected weights of type int, found {weights.get('type')!r:.60}"
            )
        activations = _activations(group.get("input_activations"), file)
        bits = whole_number(weights, "num_bits", (4, 8) if form == PACKED else (8,), file)
        try:
            kept = WeightFormat(
                8 if bits == 8 else 4,
                _size(weights, file),
                has_zero=weights.get("symmetric") is not True,
                activations=activations,
            )
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from None
        return cls(kept, form == PACKED)

    def product(self, tensors: Tensors) -> CompressedProduct:
        return CompressedProduct(tensors, self.kept, self.is_packed)


def _size(weights: Mapping[str, Any], file: str) -> int | None:
    match weights.get("strategy"):
        case "group":
            return group_size(weights, "group_size", file)
        case "channel":
            return None
        case other:
            raise CheckpointError(
                f"{file}: expected strategy group or channel of weights, found {other!r:.60}"
            )


def _activations(found: Any, file: str) -> Activations:
    if found is None:
        return "float"
    wanted = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    if not isinstance(found, Mapping) or any(found.get(k) != v for k, v in wanted.items()):
        raise CheckpointError(
            f"{file}: expected input_activations of 8 bits, each token by a scale of its own, "
            f"found {found!r:.200}"
        )
    return "int8"


class CompressedProduct:
    """A `PackedProduct`."""

    def __init__(self, tensors: Tensors, kept: WeightFormat, is_packed: bool):
        self.shape = self._shape(tensors, is_packed, 32 // kept.bits)
        num_outputs, num_inputs = self.shape
        num_groups = kept.groups(num_inputs)
        tensors.info("weight_scale", SCALE_DTYPES)
        tensors.check_shape("weight_scale", (num_outputs, num_groups))
        if kept.has_zero:
            tensors.info("weight_zero_point", ("int32",) if is_packed else ("int8",))
            height = -(-num_outputs * kept.bits // 32) if is_packed else num_outputs
            tensors.check_shape("weight_zero_point", (height, num_groups))
        self.order = input_order(tensors, "weight_g_idx", num_inputs, kept.group_size)
        self.kept = kept if self.order is None else replace(kept, has_order=True)
        self._tensors, self._is_packed = tensors, is_packed

    @staticmethod
    def _shape(tensors: Tensors, is_packed: bool, per_word: int) -> tuple[int, int]:
        if not is_packed:
            num_outputs, num_inputs = tensors.info("weight", ("int8",)).shape
            return num_outputs, num_inputs
        tensors.info("weight_shape", ("int64", "int32"), 1)
        tensors.check_shape("weight_shape", (2,))
        num_outputs, num_inputs = map(int, tensors.read("weight_shape"))
        tensors.info("weight_packed", ("int32",))
        tensors.check_shape("weight_packed", (num_outputs, -(-num_inputs // per_word)))
        return num_outputs, num_inputs

    def q(self, rows: slice) -> np.ndarray:
        if self._is_packed:
            packed = self._tensors.read("weight_packed", (rows,))
            q = self._levels(unpacked(packed, self.kept.bits, 1)[:, : self.shape[1]])
        else:
            q = self._tensors.read("weight", (rows,))
        return q if self.order is None else q[:, self.order]

    def scale(self, rows: slice) -> np.ndarray:
        return self._tensors.read("weight_scale", (rows,)).astype(np.float32).T

    def zero(self, rows: slice) -> np.ndarray:
        found = self._tensors.read("weight_zero_point")
        if not self._is_packed:
            return found[rows].T
        return self._levels(unpacked(found, self.kept.bits, 0)[: self.shape[0]])[rows].T

    def _levels(self, raised: np.ndarray) -> np.ndarray:
        """Of integers with half of their range added, which ours of 4 bits with zero points are."""
        if self.kept.bits == 4 and self.kept.has_zero:
            return raised.astype(np.int8)
        return (raised.astype(np.int16) - 2 ** (self.kept.bits - 1)).astype(np.int8)
