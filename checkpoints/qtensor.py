"""A quantized weight on the host, as integers and scales, and its packed form.

`parts` are what a file and a model hold under the product's name: q, scale, and zero if there is
one. Four-bit integers lie two in a byte: byte j of a group of g inputs holds input j in its low and
input j + g/2 in its high half (pallas_kernels/int4_matmul.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkpoints.formats import WeightFormat, packed_group


@dataclass(frozen=True, slots=True)
class QTensor:
    """value[n, k] = (q[n, k] - zero[g, n]) * scale[g, n], g = k // group_size.

    Args:
        q: int8[N, K], one integer each: of -127..127 (8 bits) or -7..7 (4 bits) without zero
            points, of -128..127 or 0..15 with.
        scale: float32[G, N], finite; 0 for a group of zeros.
        zero: int8[G, N], or None.
    """

    q: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    format: WeightFormat

    @property
    def nbytes(self) -> int:
        """As kept in a file."""
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, np.ndarray]:
        """By name, as a file and a device hold them."""
        q = pack_int4(self.q, self.format.group_size) if self.format.bits == 4 else self.q
        zero = {} if self.zero is None else {"zero": self.zero}
        return {"q": q, "scale": self.scale, **zero}

    @classmethod
    def from_parts(
        cls, parts: dict[str, np.ndarray], kept: WeightFormat, num_inputs: int
    ) -> QTensor:
        """Of what `parts` gave."""
        q = parts["q"]
        if kept.bits == 4:
            q = unpack_int4(q, kept.group_size, num_inputs, is_signed=not kept.has_zero)
        return cls(q, parts["scale"], parts.get("zero"), kept)

    def dequantized(self) -> np.ndarray:
        """float32[N, K]."""
        integers = self.q.astype(np.float32)
        if self.zero is not None:
            integers -= spread(self.zero, self.format, self.q.shape[1]).astype(np.float32)
        return integers * spread(self.scale, self.format, self.q.shape[1])


def spread(per_group: np.ndarray, kept: WeightFormat, num_inputs: int) -> np.ndarray:
    """[G, N] -> [N, K]: each group's value at each of its inputs."""
    size = kept.group_size or num_inputs
    return np.repeat(per_group.T, size, axis=1)[:, :num_inputs]


def pack_int4(q: np.ndarray, group_size: int | None) -> np.ndarray:
    """int8[N, K] -> int8[N, K'/2], K' being K filled up with zeros to whole groups.

    A scale per output is one group of all inputs, filled up to an even number.
    """
    num_inputs = q.shape[1]
    size = packed_group(group_size, num_inputs)
    q = np.pad(q, ((0, 0), (0, -num_inputs % size)))
    halves = q.reshape(len(q), q.shape[1] // size, 2, size // 2)
    packed = (halves[:, :, 0] & 15) | (halves[:, :, 1] << 4)
    return np.ascontiguousarray(packed.reshape(len(q), q.shape[1] // 2))


def unpack_int4(
    packed: np.ndarray, group_size: int | None, num_inputs: int, *, is_signed: bool
) -> np.ndarray:
    """The way back: int8[N, K]."""
    size = packed_group(group_size, num_inputs)
    both = packed.reshape(len(packed), -1, size // 2)
    low, high = ((both << 4) >> 4, both >> 4) if is_signed else (both & 15, (both >> 4) & 15)
    return np.stack([low, high], axis=2).reshape(len(packed), -1)[:, :num_inputs]
