"""A second model has what the first leaves: a pool as asked for, a smaller one, or a refusal that
says how much is missing.
"""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.config import EngineConfig, replace
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import CPU_POOL_BYTES, MemoryPlan
from jaxinfer.runtime.second_plan import plan_beside
from tests.tiny import tiny_config

PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # 16 tokens, keys and values, 2 layers, 2 heads of 16
UNKNOWN = MemoryBudget(None, 0, None)
PROGRAMS = 5000


def decoder(**changes: Any) -> Decoder:
    return decoder_for(tiny_config(**changes), dtype=jnp.dtype("float32"))


WEIGHTS = decoder().params_bytes


def plan(
    budget: MemoryBudget = UNKNOWN,
    *,
    model: Decoder | None = None,
    least_model_len: int = 640,
    **fields: Any,
) -> MemoryPlan:
    """`fields` are of the running engine's configuration."""
    config = replace(EngineConfig(), **{"page_size": 16, "max_num_seqs": 4} | fields)
    model = model or decoder()
    return plan_beside(config, model, budget, PROGRAMS, least_model_len=least_model_len)


def cpu(pages: int, more: int = 0) -> MemoryBudget:
    """Room for so many pages, and some bytes, beside a process of 1000."""
    return MemoryBudget(1000 + WEIGHTS + PROGRAMS + pages * PAGE_BYTES + more, 1000, None)


def gpu(pages: int, more: int = 0) -> MemoryBudget:
    return MemoryBudget(WEIGHTS + PROGRAMS + pages * PAGE_BYTES + more, 0, 1 << 40)


@pytest.mark.parametrize("budget", [UNKNOWN, cpu(50), gpu(50)])
def test_where_there_is_room_the_pool_is_what_was_asked_for(budget: MemoryBudget):
    got = plan(budget, kv_cache_bytes=50 * PAGE_BYTES)
    assert (got.num_pages, got.max_model_len, got.fits) == (50, 640, True)


@pytest.mark.parametrize("room", [cpu, gpu])
@pytest.mark.parametrize(
    ("pages", "given"),
    [(127, 124), (125, 124), (124, 124), (67, 64), (47, 46), (41, 40), (40, 40)],
)
def test_where_there_is_less_it_has_one_of_a_few_sizes(room: Any, pages: int, given: int):
    got = plan(room(pages, PAGE_BYTES - 1), kv_cache_bytes=128 * PAGE_BYTES)
    assert (got.num_pages, got.max_model_len, got.fits) == (given, 640, True)


def test_a_sequence_of_the_running_engine_must_fit_and_what_is_missing_is_told():
    with pytest.raises(ConfigError) as caught:
        plan(cpu(39, 1), kv_cache_bytes=100 * PAGE_BYTES)
    needed = WEIGHTS + PROGRAMS + 40 * PAGE_BYTES
    assert str(caught.value) == (
        f"a model of another shape needs memory beside the running one: weights {WEIGHTS} + "
        f"programs {PROGRAMS} + KV pool {40 * PAGE_BYTES} (of one sequence of 640 tokens) = "
        f"{needed} bytes, but {needed - PAGE_BYTES + 1} are left: {PAGE_BYTES - 1} are missing; "
        "drop other versions, or start the server with a smaller pool (--kv-cache-memory) or a "
        "smaller --max-model-len"
    )
    assert plan(cpu(40), kv_cache_bytes=100 * PAGE_BYTES).num_pages == 40
    assert plan(cpu(10), kv_cache_bytes=100 * PAGE_BYTES, least_model_len=160).num_pages == 10


def test_where_not_even_the_process_fits_all_is_missing():
    with pytest.raises(ConfigError, match="but 0 are left"):
        plan(MemoryBudget(900, 1000, None))


def test_a_context_that_was_left_open_is_shortened_down_to_the_running_engines():
    got = plan(cpu(10), kv_cache_bytes=100 * PAGE_BYTES, least_model_len=100)
    assert (got.num_pages, got.max_model_len) == (10, 160)


def test_a_context_that_was_asked_for_is_kept_whatever_the_running_engine_has():
    assert plan(cpu(20), max_model_len=320, least_model_len=16).max_model_len == 320
    with pytest.raises(ConfigError, match="one sequence of 320 tokens"):
        plan(cpu(19), max_model_len=320, least_model_len=16)


def test_a_model_that_holds_less_than_the_flags_say_gets_its_own_limit():
    short = decoder(max_position_embeddings=160)
    for fields in ({"max_model_len": 640}, {}):
        got = plan(cpu(10), model=short, kv_cache_bytes=100 * PAGE_BYTES, **fields)
        assert (got.num_pages, got.max_model_len) == (10, 160)


def test_a_pool_that_is_too_small_for_this_model_is_made_larger():
    got = plan(cpu(40), kv_cache_bytes=3 * PAGE_BYTES, max_model_len=640)
    assert (got.num_pages, got.max_model_len) == (40, 640)


def test_on_a_gpu_without_a_size_it_has_all_that_is_left():
    big = decoder(max_position_embeddings=1 << 30)
    assert plan(gpu(77, 5), model=big).num_pages == 77
    assert plan(gpu(77, 5), model=big, least_model_len=77 * 16).max_model_len == 77 * 16
    with pytest.raises(ConfigError, match=re.escape(f": {PAGE_BYTES - 5} are missing")):
        plan(gpu(77, 5), model=big, least_model_len=77 * 16 + 1)


def test_on_a_cpu_without_a_size_it_has_one_gib_if_that_is_there():
    big = decoder(max_position_embeddings=1 << 20)
    assert plan(model=big).num_pages == CPU_POOL_BYTES // PAGE_BYTES
    assert plan(cpu(1000), model=big).num_pages == 992


def test_what_is_left_of_a_gpu_is_its_budget_less_the_others_and_of_a_cpu_what_there_is():
    assert gpu(10).beside(1000).total_bytes == WEIGHTS + PROGRAMS + 10 * PAGE_BYTES - 1000
    assert gpu(10).beside(1 << 40).total_bytes == 0
    assert cpu(10).beside(1000) == cpu(10)
    assert UNKNOWN.beside(1000) == UNKNOWN
