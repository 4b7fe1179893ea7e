"""How a decoder computes: what all of its modules know, beside the sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.backend import REFERENCE, Backend


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the products inside the layers keep their weights; embedding and head stay whole.

    Raises: ValueError for a group that no kernel has.
    """

    bits: Literal[8, 4]
    group_size: int | None = None  # inputs that share a scale; None: one scale per output

    def __post_init__(self) -> None:
        groups = (None, 32, 64, 128) if self.bits == 8 else (32, 64, 128)
        if self.group_size not in groups:
            raise ValueError(
                f"group_size of {self.bits}-bit weights must be one of {groups}; "
                f"got {self.group_size}"
            )


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Static for a whole decoder."""

    dtype: jnp.dtype  # of activations, and of parameters that are not quantized
    backend: Backend = REFERENCE
    weights: WeightFormat | None = None  # None: in dtype
