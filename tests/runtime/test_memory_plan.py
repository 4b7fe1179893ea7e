"""Sizes are decided before anything is allocated, or refused in words that say what to give."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig, SchedulerConfig, replace
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime import memory_plan
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import (
    CPU_POOL_BYTES,
    MemoryPlan,
    default_dtype,
    plan_memory,
    smallest_share,
)
from pallas_kernels.backend import REFERENCE, Backend
from tests.models.tiny_decoder import PHI3
from tests.tiny import tensor_shapes, tiny_config

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 kv heads of 16, float32
PAGE_BYTES = 16 * TOKEN_BYTES
INT8_PAGE_BYTES = 16 * 2 * 2 * 2 * (16 + 4)  # with a float32 scale for each token and head
FLOAT = jnp.dtype("float32")


def decoder(dtype: str = "float32", *, backend: Backend = REFERENCE, **changes: Any) -> Decoder:
    return decoder_for(tiny_config(**changes), dtype=jnp.dtype(dtype), backend=backend)


UNKNOWN = MemoryBudget(None, 0, None)


def gpu(device: int, utilization: float = 0.9) -> MemoryBudget:
    return MemoryBudget(int(device * utilization), 0, device)


def plan(
    *,
    model: Decoder | None = None,
    budget: MemoryBudget = UNKNOWN,
    programs: int = 0,
    **fields: Any,
) -> MemoryPlan:
    """`fields` are of the engine's configuration."""
    config = replace(EngineConfig(), **{"page_size": 16, "max_num_seqs": 4} | fields)
    return plan_memory(config, model or decoder(), budget, programs)


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
def test_a_gpu_gets_what_weights_and_programs_leave(utilization: float):
    device, programs = 40 << 30, 3 << 30
    got = plan(
        model=decoder(max_position_embeddings=1 << 30),
        budget=gpu(device, utilization),
        programs=programs,
    )
    budget = int(device * utilization) - got.weights_bytes - programs
    assert got.num_pages == budget // PAGE_BYTES
    assert got.total_bytes <= int(device * utilization) < got.total_bytes + PAGE_BYTES
    got.check()


def test_a_fixed_pool_is_the_same_on_a_gpu():
    got = plan(budget=gpu(40 << 30), kv_cache_bytes=50 * PAGE_BYTES, programs=1 << 30)
    assert got.num_pages == 50


WEIGHTS = plan().weights_bytes


@pytest.mark.parametrize(("context", "pages"), [({}, 1), ({"max_model_len": 100}, 7)])
def test_the_smallest_share_of_a_gpu_that_would_do_is_named_and_does(
    context: dict[str, Any], pages: int
):
    needed, device = WEIGHTS + 1000 + pages * PAGE_BYTES, 3 << 20
    with pytest.raises(ConfigError) as caught:
        plan(budget=MemoryBudget(needed - 1, 0, device), programs=1000, **context)
    message = str(caught.value)
    assert message.startswith(f"the KV pool has room for {(pages - 1) * 16} tokens, but one ")
    assert f"need at least {needed} bytes of the device's {device}" in message
    share = float(message.rpartition("--gpu-memory-utilization ")[2].rstrip(")"))
    got = plan(budget=gpu(device, share), programs=1000, **context)
    assert got.num_pages == pages
    with pytest.raises(ConfigError):
        plan(budget=gpu(device, share - 1e-4), programs=1000, **context)


def test_a_model_that_is_larger_than_the_device_is_refused_without_a_share():
    with pytest.raises(ConfigError, match=r"need at least \d+ bytes, but the device has 1000: "):
        plan(budget=gpu(1000))


@pytest.mark.parametrize("device", [1, 3, 10**9 + 7, 80 << 30, 85_899_345_921])
@pytest.mark.parametrize("share", [0.06, 0.1, 0.3333333, 0.9, 1.0])
def test_the_smallest_share_gives_what_is_needed_and_hardly_more(device: int, share: float):
    needed = int(device * share)
    found = smallest_share(needed, device)
    assert int(device * found) >= needed
    assert found <= max(needed / device + 2e-4, 0.05)
    assert float(f"{found:.4f}") == found


def cpu(there: int) -> MemoryBudget:
    return MemoryBudget(there, 10_000_000, None)


def test_on_a_cpu_the_sum_must_be_there():
    got = plan(budget=cpu(1 << 40), kv_cache_bytes=50 * PAGE_BYTES, programs=500)
    assert got.total_bytes == 10_000_000 + WEIGHTS + 500 + 50 * PAGE_BYTES
    got.check()
    plan(budget=cpu(got.total_bytes), kv_cache_bytes=50 * PAGE_BYTES, programs=500).check()


def test_a_pool_that_is_not_there_is_refused_with_the_ones_that_would_fit():
    room = plan(budget=cpu(0), kv_cache_bytes=PAGE_BYTES * 45, programs=500).total_bytes
    budget = cpu(room + PAGE_BYTES - 1)
    fields: dict[str, Any] = {"budget": budget, "programs": 500, "max_model_len": 640}
    too_large = plan(kv_cache_bytes=100 * PAGE_BYTES, **fields)
    with pytest.raises(ConfigError) as caught:
        too_large.check()
    least, most = 40 * PAGE_BYTES, 45 * PAGE_BYTES
    assert str(caught.value) == (
        f"process 10000000 + weights {WEIGHTS} + programs 500 + kv_pool {100 * PAGE_BYTES} = "
        f"{too_large.total_bytes} bytes are planned, but there are {budget.total_bytes}; "
        f"give the pool from {least} to {most} bytes (--kv-cache-memory {most})"
    )
    plan(kv_cache_bytes=most, **fields).check()
    plan(kv_cache_bytes=least, **fields).check()
    with pytest.raises(ConfigError):
        plan(kv_cache_bytes=least - 1, **fields)
    with pytest.raises(ConfigError):
        plan(kv_cache_bytes=most + PAGE_BYTES, **fields).check()


def test_memory_in_which_nothing_fits_is_refused_with_what_is_needed():
    contexts: list[tuple[dict[str, Any], int]] = [({"max_model_len": 640}, 40), ({}, 1)]
    for context, pages in contexts:
        got = plan(budget=cpu(1000), kv_cache_bytes=50 * PAGE_BYTES, **context)
        needed = 10_000_000 + WEIGHTS + pages * PAGE_BYTES
        with pytest.raises(ConfigError, match=rf"with the smallest pool they need {needed}$"):
            got.check()


def test_unknown_memory_is_not_checked():
    plan(kv_cache_bytes=50 * PAGE_BYTES, programs=1 << 60).check()


def test_another_version_may_take_what_a_gpu_has_left():
    got = plan(budget=gpu(1 << 30), kv_cache_bytes=50 * PAGE_BYTES, programs=1000)
    assert got.free_bytes(got.total_bytes) == int(0.9 * (1 << 30)) - got.total_bytes
    assert got.free_bytes(1 << 30) == 0


def test_another_version_may_take_what_a_cpus_system_has_now(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda root: 12345)
    assert plan(budget=cpu(10)).free_bytes(7) == 12345


def test_the_sum_is_told():
    mib = 1 << 20
    got = MemoryPlan(
        20 * mib, 3 * mib, mib, 100, 16, 640, 1, MemoryBudget(2000 * mib, 7 * mib, None), FLOAT
    )
    assert got.by_kind() == {
        "process": 7 * mib,
        "weights": 20 * mib,
        "programs": 3 * mib,
        "kv_pool": 100 * mib,
    }
    assert got.line() == (
        "process 7 MiB + weights 20 MiB + programs 3 MiB + KV pool 100 MiB "
        "(100 pages of 16 tokens) = 130 MiB of 2,000 MiB"
    )
    int8 = dataclasses.replace(got, pages_dtype=jnp.dtype("int8"))
    assert "KV pool 100 MiB (100 pages of 16 tokens, int8) = 130 MiB" in int8.line()
    on_gpu = MemoryPlan(20 * mib, 3 * mib, mib, 100, 16, 640, 1, gpu(1000 * mib), FLOAT)
    assert on_gpu.line().startswith("weights 20 MiB + ")
    assert on_gpu.line().endswith(" = 123 MiB of 900 MiB")


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
        f"{6 * PAGE_BYTES} bytes (--kv-cache-memory {6 * PAGE_BYTES}) or lower max_model_len"
    )
    assert plan(max_model_len=81, kv_cache_bytes=6 * PAGE_BYTES).max_model_len == 81


def test_a_context_over_the_models_is_refused():
    assert plan(max_model_len=640).max_model_len == 640
    with pytest.raises(ConfigError, match="max_model_len must be at most the model's 640; got 641"):
        plan(max_model_len=641)


def test_a_pool_without_a_page_is_refused():
    with pytest.raises(ConfigError, match=rf"room for 0 .* may have 16; .* least {PAGE_BYTES} "):
        plan(kv_cache_bytes=PAGE_BYTES - 1)
    assert plan(kv_cache_bytes=PAGE_BYTES).num_pages == 1


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


def test_int8_pages_take_a_byte_a_number_and_a_scale_for_each_token_and_head():
    got = plan(kv_cache_bytes=50 * INT8_PAGE_BYTES, kv_cache_dtype="int8")
    assert (got.num_pages, got.page_bytes) == (50, INT8_PAGE_BYTES)
    assert plan(kv_cache_bytes=50 * INT8_PAGE_BYTES).num_pages == 15
    half = plan(model=decoder("bfloat16"), kv_cache_bytes=1 << 16, kv_cache_dtype="int8")
    assert half.num_pages == (1 << 16) // INT8_PAGE_BYTES


KEYS_OF_PAGE = 16 * 2 * 16  # bytes of a layer's keys in int8
MOST_PAGES = (2**31 - 1) // KEYS_OF_PAGE
NEXT_PAGES = 2**32 // KEYS_OF_PAGE + 1
KERNELS: dict[str, Any] = {
    "backend": Backend("pallas", "sm_90"),
    "max_position_embeddings": 1 << 30,
}


@pytest.mark.parametrize("num_pages", [MOST_PAGES + 1, NEXT_PAGES - 1])
def test_int8_pages_that_gpu_kernels_cannot_address_are_refused_with_the_next_that_they_can(
    num_pages: int,
):
    fields: dict[str, Any] = {"model": decoder(**KERNELS), "kv_cache_dtype": "int8"}
    with pytest.raises(ConfigError) as caught:
        plan(kv_cache_bytes=num_pages * INT8_PAGE_BYTES, **fields)
    least, most = NEXT_PAGES * INT8_PAGE_BYTES, MOST_PAGES * INT8_PAGE_BYTES
    assert f"(--kv-cache-memory {most}), at least {least} " in str(caught.value)
    for good, pages in ((least, NEXT_PAGES), (most, MOST_PAGES)):
        assert plan(kv_cache_bytes=good, **fields).num_pages == pages
    del fields["model"]
    reference = decoder(max_position_embeddings=1 << 30)
    assert plan(model=reference, kv_cache_bytes=num_pages * INT8_PAGE_BYTES, **fields).num_pages
    assert plan(model=decoder(**KERNELS), kv_cache_bytes=num_pages * PAGE_BYTES).num_pages


def test_a_planned_int8_pool_is_cut_to_what_gpu_kernels_can_address(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.WARNING):
        got = plan(model=decoder(**KERNELS), budget=gpu(16 << 30), kv_cache_dtype="int8")
    assert got.num_pages == MOST_PAGES
    assert f"the KV pool holds {MOST_PAGES} pages: " in caplog.text


@pytest.mark.parametrize(("num_pages", "is_short"), [(20, True), (21, False)])
def test_a_pool_of_short_texts_alone_says_that_they_turn_by_long_factors(
    num_pages: int, is_short: bool, caplog: pytest.LogCaptureFixture
):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    says = {"type": "longrope", "original_max_position_embeddings": 320} | factors
    with caplog.at_level(logging.WARNING):
        plan(model=decoder(**PHI3, rope_scaling=says), kv_cache_bytes=num_pages * PAGE_BYTES)
    assert ("--max-model-len 320 takes those for short ones" in caplog.text) == is_short


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_planned_pool_is_the_pool_that_is_made(kv_cache_dtype: str):
    from jaxinfer.runtime.kv_cache import make_pages

    model = decoder()
    got = plan(
        model=model,
        kv_cache_bytes=7 * PAGE_BYTES,
        max_model_len=64,
        kv_cache_dtype=kv_cache_dtype,
    )
    pages = make_pages(
        model.config, num_pages=got.num_pages, page_size=got.page_size, dtype=got.pages_dtype
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == got.pool_bytes
