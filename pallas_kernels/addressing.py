"""Arrays that the Triton lowering of Pallas cannot address.

It counts offsets in elements, in 32 bits with a sign, unless an array has more than 2**32 bytes
(jax 0.10.2 to 0.12): of an array of one-byte elements with 2 to 4 GiB, the upper part is read and
written at wrong addresses. Wider elements are safe at any size.
"""

from __future__ import annotations

import math

import jax

LOWEST_BAD, LOWEST_GOOD = 2**31, 2**32 + 1  # bytes


def is_addressable(num_elements: int, itemsize: int) -> bool:
    """Whether a kernel reads and writes all of an array of elements of `itemsize` bytes."""
    return itemsize != 1 or not LOWEST_BAD <= num_elements < LOWEST_GOOD


def check_addressable(**arrays: jax.Array) -> None:
    """Raises ValueError naming the first argument that a kernel would address wrongly."""
    for name, array in arrays.items():
        size = math.prod(array.shape)
        if not is_addressable(size, array.dtype.itemsize):
            raise ValueError(
                f"{name} must have fewer than 2**31 or more than 2**32 bytes: GPU kernels address "
                f"one-byte elements in between wrongly; got {array.shape}, {size} bytes"
            )
