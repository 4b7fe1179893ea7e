"""Tiny models, built: their files are those of bench/tiny_model.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.tiny_model import (
    EOS,
    TEMPLATE,
    tensor_shapes,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from jaxinfer.build import Built, build
from jaxinfer.config import EngineConfig, replace

__all__ = [
    "EOS",
    "TEMPLATE",
    "build_tiny",
    "tensor_shapes",
    "tiny_config",
    "tiny_engine_config",
    "tiny_tensors",
    "write_checkpoint",
]


def tiny_engine_config(model: Path, cache_dir: Path, **fields: Any) -> EngineConfig:
    """Small buckets, pages of 16 tokens, a pool of 80 pages."""
    return replace(
        EngineConfig(),
        **{
            "model": str(model),
            "cache_dir": str(cache_dir),
            "page_size": 16,
            "kv_cache_bytes": 80 * 16 * 2 * 2 * 2 * 16 * 4,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "show_progress": False,
        }
        | fields,
    )


def build_tiny(folder: Path, *, seed: int = 0, fields: Any = None, **changes: Any) -> Built:
    """Writes a checkpoint into `folder` and builds it; `fields` are of the engine's config."""
    model = write_checkpoint(folder / "model", seed=seed, **changes)
    return build(tiny_engine_config(model, folder / "cache", **(fields or {})))
