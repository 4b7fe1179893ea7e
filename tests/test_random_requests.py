"""After READY nothing compiles and everything ends, whatever comes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, SamplingParams, replace
from jaxinfer.offline import LLM
from tests.random_requests import (
    FEATURES,
    Limits,
    RandomRequests,
    assert_nothing_compiled_and_nothing_kept,
)
from tests.tiny_llm import tiny_llm

NOT_RANDOM = {"max_tokens", "min_tokens", "temperature"}  # these always are


def test_every_sampling_field_is_a_feature():
    """A new one is to be added to FEATURES."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert FEATURES.keys() == fields - NOT_RANDOM


def test_requests_are_the_same_for_a_seed_and_of_all_lengths():
    limits = Limits(max_prompt=300, max_tokens=8, page_size=16, step_s=0.01)
    drawn = [[RandomRequests(seed, 400, limits).draw(0.0) for _ in range(1)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    many = RandomRequests(0, 400, limits)
    lengths = np.array([len(many.draw(0.0).token_ids) for _ in range(500)])
    assert lengths.min() == 1
    assert 250 < lengths.max() <= 300
    assert 30 < lengths.mean() < 60


def test_300_requests_over_every_feature_compile_nothing(
    tmp_path_factory: pytest.TempPathFactory,
):
    llm = tiny_llm(tmp_path_factory, {"max_num_seqs": 16, "max_num_batched_tokens": 16})
    limits = Limits(max_prompt=150, max_tokens=20, page_size=16, step_s=0.002)
    assert_nothing_compiled_and_nothing_kept(llm._built, 300, limits, num_pages=16)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_2000_requests_over_every_feature_compile_nothing(default_model: Path):
    config = replace(EngineConfig(), model=str(default_model), show_progress=False)
    config = replace(config, max_model_len=1024, kv_cache_bytes=1 << 26, page_size=16)
    built = LLM(config=config)._built
    limits = Limits(max_prompt=400, max_tokens=16, page_size=16, step_s=0.1)
    assert_nothing_compiled_and_nothing_kept(built, 2000, limits, num_pages=64)
