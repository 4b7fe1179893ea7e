"""jaxinfer: an LLM inference and serving engine on JAX/XLA.

Names are loaded at first use: the host half must be importable without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxinfer.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig, SamplingParams
    from jaxinfer.errors import JaxInferError
    from jaxinfer.offline import LLM, generate

__all__ = ["LLM", "EngineConfig", "JaxInferError", "SamplingParams", "generate"]

_HOMES = {
    "EngineConfig": "jaxinfer.config",
    "SamplingParams": "jaxinfer.config",
    "JaxInferError": "jaxinfer.errors",
    "LLM": "jaxinfer.offline",
    "generate": "jaxinfer.offline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
