"""The forms of one model that are set side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import KVCacheDtype
from jaxinfer.runtime.weight_choice import ON_THE_FLY


@dataclass(frozen=True, slots=True)
class Variant:
    """One form: of the model itself, or another checkpoint."""

    name: str  # in the table
    model: str  # path, hub id or catalog name
    rounded_to: str | None = None  # of ON_THE_FLY; None: as the checkpoint has it
    kv_cache: KVCacheDtype = "auto"
    is_made: bool = False  # a checkpoint made of the model, which may be quantized

    def engine_fields(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Of EngineConfig, to serve it whatever it costs."""
        own: dict[str, Any] = {"model": self.model, "max_kl": math.inf}
        if not self.is_made:
            own["quantization"] = self.rounded_to or "none"
        if self.kv_cache != "auto":
            own["kv_cache_dtype"] = self.kv_cache
        return {**common, **own}


def variants_of(model: str, also: Mapping[str, str]) -> Sequence[Variant]:
    """The original first; `also`: further checkpoints by the name in the table."""
    return (
        Variant("none", model),
        *(Variant(f"{name} on the fly", model, name) for name in ON_THE_FLY),
        Variant("none, KV int8", model, kv_cache="int8"),
        *(Variant(name, path, is_made=True) for name, path in also.items()),
    )
