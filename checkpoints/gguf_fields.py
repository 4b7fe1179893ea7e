"""The metadata of one GGUF file's architecture, key by key.

A key that would change the arithmetic is read or refused, never passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError

MOST = 1 << 31
LARGEST = 1e38  # of numbers, which are kept as float32
OFF = (0,)
OFF_OR_ONE = (0, 1)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": OFF,
    "attention.max_alibi_bias": OFF,
    "attention.output_scale": OFF_OR_ONE,
    "attention.scale": OFF,
    "attention.sliding_window": OFF,
    "attention.temperature_scale": OFF,
    "attn_logit_softcapping": OFF,
    "embedding_scale": OFF_OR_ONE,
    "expert_count": OFF,
    "expert_gating_func": OFF_OR_ONE,  # 1 is softmax
    "expert_group_count": OFF_OR_ONE,
    "expert_weights_scale": OFF_OR_ONE,
    "final_logit_softcapping": OFF,
    "leading_dense_block_count": OFF,
    "logit_scale": OFF_OR_ONE,
    "nextn_predict_layers": OFF,
    "residual_scale": OFF_OR_ONE,
    "rope.scaling.alpha": OFF,
    "rope.scaling.attn_factor": OFF_OR_ONE,
    "rope.scaling.yarn_ext_factor": OFF_OR_ONE,
    "router_logit_softcapping": OFF,
}
"""What those keys may be where an architecture does not read them."""


class Fields:
    """Raises, as all its methods do: CheckpointError naming file and key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], prefix: str):
        self.path = path
        self._metadata, self._prefix = metadata, prefix
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """As it is in the file; None if there is none."""
        self._read.add(key)
        return self._metadata.get(f"{self._prefix}.{key}")

    def integer(self, key: str, default: int | None = None, *, most: int = MOST) -> int:
        """A positive one."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.error(key, f"a positive integer, at most {most}", value)
        return value

    def whole(self, key: str, default: int = 0) -> int:
        """A positive integer or 0."""
        return 0 if self._is_zero(key) else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive one."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number", value)
        if not 0 < value < LARGEST:
            raise self.error(key, "a positive number", value)
        return shortest(value)

    def optional(self, key: str) -> float | None:
        """A positive number; None where it is absent or 0."""
        return None if self.get(key) is None or self._is_zero(key) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def _is_zero(self, key: str) -> bool:
        value = self.get(key)
        return isinstance(value, int | float) and value == 0

    def refuse_unread(self) -> None:
        """What would change the arithmetic and nobody asked for."""
        for key, neutral in NEUTRAL.items():
            value = None if key in self._read else self.get(key)
            if value is not None and not (isinstance(value, int | float) and value in neutral):
                raise self.error(key, f"absent or {neutral[-1]} in {self._prefix}", value)

    def error(self, key: str, expected: str, found: Any) -> CheckpointError:
        shown = "none" if found is None else f"{found!r:.60}"
        return CheckpointError(
            f"{self.path}: expected metadata '{self._prefix}.{key}' to be {expected}, found {shown}"
        )


def shortest(value: float) -> float:
    """What was written as a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
