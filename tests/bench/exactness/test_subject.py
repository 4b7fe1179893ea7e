"""Engines with other limits over one set of programs."""

from __future__ import annotations

import pytest

from jaxinfer.config import SchedulerConfig
from jaxinfer.errors import ConfigError
from jaxinfer.scheduling.page_pool import PagePool
from tests.bench.exactness.fake_subject import MAX_MODEL_LEN, NUM_PAGES, PAGE_SIZE, FakeBuilt

MOST = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN)


def test_another_engine_may_have_all_that_the_programs_are_for():
    engine = FakeBuilt().another_engine(MOST, lambda: PagePool(NUM_PAGES, PAGE_SIZE))
    assert engine.pool_stats().pages_total == NUM_PAGES
    assert engine.max_total_tokens == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("config", "pool"),
    [
        (SchedulerConfig(17, 64, MAX_MODEL_LEN), (NUM_PAGES, PAGE_SIZE)),
        (SchedulerConfig(16, 65, MAX_MODEL_LEN), (NUM_PAGES, PAGE_SIZE)),
        (MOST, (NUM_PAGES + 1, PAGE_SIZE)),
        (MOST, (NUM_PAGES, 2 * PAGE_SIZE)),
    ],
)
def test_what_the_programs_are_not_for_is_refused(config: SchedulerConfig, pool: tuple[int, int]):
    with pytest.raises(ConfigError, match=r"at most \(16, 64, 160\) .* pages of 16 tokens; got"):
        FakeBuilt().another_engine(config, lambda: PagePool(*pool))
