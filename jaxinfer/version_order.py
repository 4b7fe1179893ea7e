"""What an operator asks for who wants another version of the weights served.

No JAX here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxinfer.config import ModelSource

SwapMode = Literal["beside", "stream"]


@dataclass(frozen=True, slots=True)
class VersionOrder:
    """One of them."""

    source: ModelSource
    expected_version: str | None = None  # content hash that it must have; None: any
    swap_mode: SwapMode = "beside"  # stream: without room for both, tensor by tensor, in a pause
