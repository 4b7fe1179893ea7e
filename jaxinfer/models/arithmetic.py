"""How a decoder computes: what all of its modules know, beside the sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from checkpoints.formats import Quantization, WeightFormat
from pallas_kernels.backend import REFERENCE, Backend


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Static for a module and what it is made of."""

    dtype: jnp.dtype  # of activations, and of parameters that are not quantized
    backend: Backend = REFERENCE
    quantization: Quantization | None = None  # of the module's products, by their names in it

    def inside(self, prefix: str) -> Arithmetic:
        """Of the part of the module that has this name."""
        if self.quantization is None:
            return self
        return replace(self, quantization=self.quantization.inside(prefix))

    def format_of(self, product: str) -> WeightFormat | None:
        """How a product keeps its weights; None: in dtype."""
        return None if self.quantization is None else self.quantization.of(product)

    @property
    def head_format(self) -> WeightFormat | None:
        """The same of embedding and head."""
        return None if self.quantization is None else self.quantization.head

    @property
    def is_unpacked(self) -> bool:
        """Whether four-bit integers are held one in a byte, less their zero points: XLA multiplies
        int8 by int8, and would unpack them anew in every step."""
        return self.backend.form == "reference"
