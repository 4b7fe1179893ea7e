"""Arrays that the Triton lowering of Pallas cannot address.

It counts offsets in elements, in 32 bits with a sign, unless an array has more than 2**32 bytes
(jax 0.10.2 to 0.12): of an array of one-byte elements with 2 to 4 GiB, the upper part is read and
written at wrong addresses. Wider elements are safe at any size.
"""

from __future__ import annotations

import math

import jax

LOWEST_BAD, LOWEST_GOOD = 2**31, 2**32 + 1  # bytes


def check_addressable(**arrays: jax.Array) -> None:
    """Raises ValueError naming the first argument that a kernel would address wrongly."""
    for name, array in arrays.items():
        size = math.prod(array.shape)
        if array.dtype.itemsize == 1 and LOWEST_BAD <= size < LOWEST_GOOD:
            raise ValueError(
                f"{name} must have fewer than 2**31 or more than 2**32 bytes: GPU kernels address "
                f"one-byte elements in between wrongly; got {array.shape}, {size} bytes"
            )
