"""Loaded tiny models that share their compiled programs within a test session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.offline import LLM
from tests.tiny import tiny_engine_config, write_checkpoint

SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16}  # the fewest programs


def shared_cache(factory: pytest.TempPathFactory) -> Path:
    """One cache folder for the whole session: a program is compiled once."""
    return factory.getbasetemp() / "cache"


def tiny_llm(
    factory: pytest.TempPathFactory, fields: dict[str, Any] | None = None, **changes: Any
) -> LLM:
    """`fields` are of the engine's config, `changes` of config.json."""
    model = write_checkpoint(factory.mktemp("model"), **changes)
    config = tiny_engine_config(
        model, shared_cache(factory), **(SMALL if fields is None else fields)
    )
    return LLM(config=config)


def pages_used(llm: LLM) -> int:
    return llm._built.engine.pool_stats().pages_used
