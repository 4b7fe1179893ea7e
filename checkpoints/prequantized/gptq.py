"""GPTQ's folders (arXiv:2210.17323) as AutoGPTQ and GPTQModel write them.

value[k, n] = (qweight[k, n] - zero[g, n]) * scales[g, n]. Packed along the inputs (weights) or the
outputs (zero points), 32 bits at a time; `gptq` keeps zero points less 1, `gptq_v2` as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats import WeightFormat
from checkpoints.prequantized.product import (
    SCALE_DTYPES,
    Tensors,
    group_size,
    input_order,
    unpacked,
    whole_number,
)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Of a whole folder."""

    kept: WeightFormat
    zeros_less_one: bool
    marks: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    @classmethod
    def of(cls, config: Mapping[str, Any], file: str) -> GPTQ:
        """Of quantization_config. Raises: CheckpointError for what is not read."""
        bits = whole_number(config, "bits", (4, 8), file)
        kept = WeightFormat(
            8 if bits == 8 else 4,
            group_size(config, "group_size", file),
            has_zero=config.get("sym") is not True,
        )
        form = config.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise CheckpointError(
                f"{file}: expected checkpoint_format gptq or gptq_v2, found {form!r:.60}"
            )
        return cls(kept, form == "gptq")

    def product(self, tensors: Tensors) -> GPTQProduct:
        return GPTQProduct(tensors, self.kept, self.zeros_less_one)


class GPTQProduct:
    """A `PackedProduct`."""

    def __init__(self, tensors: Tensors, kept: WeightFormat, zeros_less_one: bool):
        per_word = 32 // kept.bits
        words, num_outputs = tensors.info("qweight", ("int32",)).shape
        num_inputs = words * per_word
        num_groups = kept.groups(num_inputs)
        tensors.info("scales", SCALE_DTYPES)
        tensors.check_shape("scales", (num_groups, num_outputs))
        tensors.info("qzeros", ("int32",))
        tensors.check_shape("qzeros", (num_groups, -(-num_outputs // per_word)))
        self.shape = (num_outputs, num_inputs)
        self._tensors, self._zeros_less_one = tensors, zeros_less_one
        self._middle = 2 ** (kept.bits - 1)
        self.order = input_order(tensors, "g_idx", num_inputs, kept.group_size)
        self.kept = kept if self.order is None else replace(kept, has_order=True)

    def q(self, rows: slice) -> np.ndarray:
        q = unpacked(self._tensors.read("qweight", (slice(None), rows)), self.kept.bits, 0).T
        q = q if self.order is None else q[:, self.order]
        # Four bits with zero points stay from 0 to 15; all others are about the middle, as int8.
        low = 0 if self.kept.bits == 4 and self.kept.has_zero else self._middle
        if not self.kept.has_zero:
            self._check_middle(rows)
        return (q.astype(np.int16) - low).astype(np.int8)

    def scale(self, rows: slice) -> np.ndarray:
        return self._tensors.read("scales", (slice(None), rows)).astype(np.float32)

    def zero(self, rows: slice) -> np.ndarray:
        low = 0 if self.kept.bits == 4 else self._middle
        return (self._zeros(rows) - low).astype(np.int8)

    def _zeros(self, rows: slice) -> np.ndarray:
        """int16[G, n]; one that was 0 was packed as all ones, which is 0 again."""
        zeros = unpacked(self._tensors.read("qzeros"), self.kept.bits, 1)[:, : self.shape[0]]
        zeros = zeros[:, rows].astype(np.int16)
        return (zeros + 1) & (2**self.kept.bits - 1) if self._zeros_less_one else zeros

    def _check_middle(self, rows: slice) -> None:
        if (self._zeros(rows) != self._middle).any():
            raise self._tensors.error(
                "qzeros", f"zero points of {self._middle} alone, since quantization_config has sym"
            )
