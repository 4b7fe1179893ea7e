"""Sizes are decided before anything is allocated, or refused in words that say what to give."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig, SchedulerConfig, replace
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import Decoder, decoder_for
from jaxinfer.runtime import memory_plan
from jaxinfer.runtime.memory_plan import (
    CPU_POOL_BYTES,
    GPU_PROGRAM_BYTES,
    MemoryPlan,
    default_dtype,
    plan_memory,
)
from tests.tiny import tensor_shapes, tiny_config

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 kv heads of 16, float32
PAGE_BYTES = 16 * TOKEN_BYTES


def decoder(dtype: str = "float32", **changes: Any) -> Decoder:
    return decoder_for(tiny_config(**changes), dtype=jnp.dtype(dtype))


def plan(*, model: Decoder | None = None, **fields: Any) -> MemoryPlan:
    config = replace(EngineConfig(), **{"page_size": 16, "max_num_seqs": 4} | fields)
    return plan_memory(config, model or decoder())


def no_stats() -> None:
    return None


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not say how much memory it has."""
    devices = [SimpleNamespace(memory_stats=no_stats)]
    monkeypatch.setattr(memory_plan.jax, "devices", lambda: devices)


def test_the_pool_is_what_was_asked_for_in_whole_pages():
    got = plan(kv_cache_bytes=50 * PAGE_BYTES + PAGE_BYTES - 1)
    assert (got.num_pages, got.page_size, got.page_bytes) == (50, 16, PAGE_BYTES)
    assert got.pool_bytes == 50 * PAGE_BYTES
    assert got.num_tokens == 800
    assert got.max_model_len == 640


def test_weights_are_counted_in_their_dtype():
    elements = sum(int(np.prod(shape)) for shape in tensor_shapes(tiny_config()).values())
    assert plan().weights_bytes == elements * 4
    half = plan(model=decoder("bfloat16"), kv_cache_bytes=50 * PAGE_BYTES)
    assert half.weights_bytes == elements * 2
    assert half.num_pages == 100


def test_the_pool_is_no_larger_than_full_contexts_of_all_sequences():
    assert plan(kv_cache_bytes=1 << 40).num_pages == 4 * 40
    assert plan(kv_cache_bytes=1 << 40, max_model_len=100).num_pages == 4 * 7


def test_a_cpu_gets_one_gib():
    big = decoder(max_position_embeddings=1 << 20)
    got = plan(model=big)
    assert got.num_pages == CPU_POOL_BYTES // PAGE_BYTES
    assert got.pool_bytes <= CPU_POOL_BYTES


@pytest.mark.parametrize("utilization", [0.5, 0.9])
def test_a_gpu_gets_what_weights_and_programs_leave(
    monkeypatch: pytest.MonkeyPatch, utilization: float
):
    limit = 40 << 30
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": 1 << 30})
    monkeypatch.setattr(memory_plan.jax, "devices", lambda: [device])
    got = plan(model=decoder(max_position_embeddings=1 << 30), memory_utilization=utilization)
    budget = int(limit * utilization) - got.weights_bytes - GPU_PROGRAM_BYTES
    assert got.num_pages == budget // PAGE_BYTES


def test_a_gpu_without_room_for_the_programs_is_refused(monkeypatch: pytest.MonkeyPatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1 << 30})
    monkeypatch.setattr(memory_plan.jax, "devices", lambda: [device])
    with pytest.raises(ConfigError, match="the KV pool has room for 0 tokens"):
        plan()


def test_a_pool_smaller_than_the_context_shortens_it_where_that_was_left_open():
    got = plan(kv_cache_bytes=5 * PAGE_BYTES)
    assert got.num_pages == 5
    assert got.max_model_len == 80


def test_a_wanted_context_is_kept_or_refused():
    assert plan(max_model_len=80, kv_cache_bytes=5 * PAGE_BYTES).max_model_len == 80
    with pytest.raises(ConfigError) as caught:
        plan(max_model_len=81, kv_cache_bytes=5 * PAGE_BYTES)
    assert str(caught.value) == (
        "the KV pool has room for 80 tokens, but one sequence may have 81; give it at least "
        f"{6 * PAGE_BYTES} bytes (--kv-cache-memory) or lower max_model_len"
    )
    assert plan(max_model_len=81, kv_cache_bytes=6 * PAGE_BYTES).max_model_len == 81


def test_a_context_over_the_models_is_refused():
    assert plan(max_model_len=640).max_model_len == 640
    with pytest.raises(ConfigError, match="max_model_len must be at most the model's 640; got 641"):
        plan(max_model_len=641)


def test_a_pool_without_a_page_is_refused():
    with pytest.raises(ConfigError, match="room for 0 tokens"):
        plan(kv_cache_bytes=PAGE_BYTES - 1)


def test_the_scheduler_gets_the_resolved_context():
    config = SchedulerConfig(max_num_seqs=3)
    got = plan(kv_cache_bytes=5 * PAGE_BYTES).scheduler_config(config)
    assert got == SchedulerConfig(max_num_seqs=3, max_model_len=80)
    assert config.max_model_len is None


@pytest.mark.parametrize(
    ("name", "platform", "want"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "gpu", "bfloat16"),
        ("float32", "gpu", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_weights_are_bfloat16_on_a_gpu_and_float32_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, platform: str, want: str
):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert default_dtype(name) == jnp.dtype(want)


def test_the_planned_pool_is_the_pool_that_is_made(tmp_path: Path):
    from jaxinfer.runtime.kv_cache import make_pages

    model = decoder()
    got = plan(model=model, kv_cache_bytes=7 * PAGE_BYTES, max_model_len=64)
    pages = make_pages(
        model.config, num_pages=got.num_pages, page_size=got.page_size, dtype=model.dtype
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == got.pool_bytes
