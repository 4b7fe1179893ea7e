"""x @ weight.T of a weight that is kept as integers: which product computes a format where.

On XLA's own operations every product is of int8 by int8 (integer_matmul.py). The kernels take float
rows as they are, and round rows only where the format says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from checkpoints.formats import WeightFormat
from pallas_kernels.backend import Backend
from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.integer_matmul import integer_matmul
from pallas_kernels.w8a8_matmul import quantize_rows, w8a8_matmul


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """value = (q - zero) * scale; layouts: checkpoints/qtensor.py, and `Arithmetic.is_unpacked`."""

    q: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    x_scale: jax.Array | None = None  # float32[]: static, of what it is multiplied by


def quantized_product(
    x: jax.Array,
    weight: IntegerWeight,
    kept: WeightFormat,
    *,
    out_dtype: DTypeLike,
    backend: Backend,
) -> jax.Array:
    """float[T, in] -> out_dtype[T, out]."""
    q, scale, zero = weight.q, weight.scale, weight.zero
    if backend.form == "reference":
        return integer_matmul(
            x,
            q,
            scale,
            zero,
            group_size=kept.group_size,
            num_terms=2 if kept.activations == "float" else 1,
            x_scale=weight.x_scale,
            out_dtype=out_dtype,
        )
    if kept.activations != "float":
        xq, x_scale = quantize_rows(x, weight.x_scale)
        return w8a8_matmul(xq, x_scale, q, scale[0], out_dtype=out_dtype, backend=backend)
    matmul = int4_matmul if kept.bits == 4 else int8_matmul
    return matmul(x, q, scale, zero, out_dtype=out_dtype, backend=backend)
