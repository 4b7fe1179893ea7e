"""AWQ's folders (arXiv:2306.00978) as AutoAWQ writes them, in its `gemm` layout.

value[k, n] = (qweight[k, n] - qzeros[g, n]) * scales[g, n], packed along the outputs: of eight
outputs, those of even numbers come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats import WeightFormat
from checkpoints.prequantized.product import (
    SCALE_DTYPES,
    Tensors,
    group_size,
    unpacked,
    whole_number,
)

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in their word


@dataclass(frozen=True, slots=True)
class AWQ:
    """Of a whole folder."""

    kept: WeightFormat
    marks: tuple[str, ...] = ("qweight", "qzeros", "scales")

    @classmethod
    def of(cls, config: Mapping[str, Any], file: str) -> AWQ:
        """Of quantization_config. Raises: CheckpointError for what is not read."""
        bits = "bits" if "bits" in config else "w_bit"
        size = "group_size" if "group_size" in config else "q_group_size"
        whole_number(config, bits, (4,), file)
        version = config.get("version", "gemm")
        if str(version).lower() != "gemm" or config.get("zero_point", True) is not True:
            raise CheckpointError(
                f"{file}: expected AWQ of version gemm with zero points, found version "
                f"{version!r:.60} and zero_point {config.get('zero_point')!r:.60}"
            )
        return cls(WeightFormat(4, group_size(config, size, file), has_zero=True))

    def product(self, tensors: Tensors) -> AWQProduct:
        return AWQProduct(tensors, self.kept)


class AWQProduct:
    """A `PackedProduct`."""

    order = None

    def __init__(self, tensors: Tensors, kept: WeightFormat):
        num_inputs, words = tensors.info("qweight", ("int32",)).shape
        num_groups, num_outputs = kept.groups(num_inputs), words * PER_WORD
        tensors.info("scales", SCALE_DTYPES)
        tensors.check_shape("scales", (num_groups, num_outputs))
        tensors.info("qzeros", ("int32",))
        tensors.check_shape("qzeros", (num_groups, words))
        self.kept, self.shape = kept, (num_outputs, num_inputs)
        self._tensors = tensors

    def q(self, rows: slice) -> np.ndarray:
        return self._outputs("qweight", rows).T

    def scale(self, rows: slice) -> np.ndarray:
        return self._tensors.read("scales", (slice(None), rows)).astype(np.float32)

    def zero(self, rows: slice) -> np.ndarray:
        return self._outputs("qzeros", rows)

    def _outputs(self, part: str, rows: slice) -> np.ndarray:
        """int8[..., n]."""
        first, last, step = rows.indices(self.shape[0])
        start = first // PER_WORD
        words = self._tensors.read(part, (slice(None), slice(start, -(-last // PER_WORD))))
        every = unpacked(words, 4, 1).reshape(*words.shape, PER_WORD)
        ordered = every[:, :, PLACES].reshape(len(words), words.shape[1] * PER_WORD)
        return ordered[:, first - start * PER_WORD : last - start * PER_WORD : step].astype(np.int8)
