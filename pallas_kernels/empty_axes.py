"""Arrays without elements, which no kernel takes: its grid would have no program."""

from __future__ import annotations

import jax


def check_not_empty(**arrays: jax.Array) -> None:
    """Raises ValueError naming the first argument that has an axis of length 0."""
    for name, array in arrays.items():
        if 0 in array.shape:
            raise ValueError(f"{name} must have no empty axis for a kernel; got {array.shape}")
