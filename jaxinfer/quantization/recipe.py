"""What a user asks of quantizing: formats, method, and what may be moved or spared.

Facts only: jaxinfer/quantization/quantizer.py does it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from checkpoints.formats import HEAD_FORMAT, WeightFormat
from jaxinfer.errors import ConfigError

Method = Literal["auto", "nearest", "gptq", "learned"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Of a whole model.

    Raises: ConfigError for what can't be done.
    """

    weights: WeightFormat  # of the products inside the layers
    head: WeightFormat | None = HEAD_FORMAT  # of embedding and head; None: float
    method: Method = "auto"  # gptq, or nearest with clipping by the inputs for a product where
    # that has less error on calibration inputs kept apart
    migrate: bool = True  # channels are scaled where that folds exactly (sites.py)
    migrate_keys: bool = False  # keys are scaled for an int8 KV cache, queries against it
    keep_at_8_bits: float | None = None  # relative error above which a 4-bit product gets 8 bits

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(
                f"method must be one of {', '.join(get_args(Method))}; got {self.method!r}"
            )
        if self.head not in (None, HEAD_FORMAT):
            raise ConfigError(
                "embedding and head are kept as int8 with a scale per token, or in float; "
                f"got {self.head}"
            )
        if self.keep_at_8_bits is None:
            return
        if self.weights.bits != 4:
            raise ConfigError("keeping products at 8 bits needs 4-bit weights; leave it away")
        if not 0 < self.keep_at_8_bits < 1:
            raise ConfigError(
                "keeping products at 8 bits takes a relative error between 0 and 1, such as 0.1; "
                f"got {self.keep_at_8_bits}"
            )

    @property
    def spared(self) -> WeightFormat:
        """Of a product that 4 bits would hurt too much."""
        return replace(self.weights, bits=8)

    @property
    def description(self) -> str:
        """For the certificate."""
        parts = [self.method]
        if self.migrate:
            parts.append("channel scaling")
        if self.migrate_keys:
            parts.append("key scaling")
        if self.keep_at_8_bits is not None:
            parts.append(f"8 bits where the error is above {self.keep_at_8_bits:g}")
        return ", ".join(parts)
