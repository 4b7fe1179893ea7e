"""A sum over the last axis whose bits do not depend on how many rows there are.

XLA CPU sums a reduction of fewer than 4096 elements in another order than a larger one (measured on
jax 0.10.2 and 0.12, tests/pallas_kernels/test_row_sum.py). Where the fewest rows that a caller ever
has stay below that, the row is folded by halves instead: additions of whole slices, in an order
that the source fixes. Long rows keep the compiler's reduction, which is faster.

Do not follow it with a product and an addition: the compiler may fuse all of it, and whether they
become one fused multiply-add then depends on the number of rows (seen on jax 0.10.2, whose CPU
compiler drops optimization barriers before it fuses).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SAME_ORDER_FROM = 4096  # elements


def row_sum(x: jax.Array, *, least_rows: int = 1) -> jax.Array:
    """float[..., D] -> float[...].

    Args:
        least_rows: rows (elements of the leading axes) of the smallest array that any program
            reduces in this place; all callers that must agree give the same number. 1: always
            fold.
    """
    width = x.shape[-1]
    if least_rows * width >= SAME_ORDER_FROM:
        return jnp.sum(x, axis=-1)
    whole = 1 << (width - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, whole - width)])
    while whole > 1:
        whole //= 2
        x = x[..., :whole] + x[..., whole:]
    return x[..., 0]
