"""Exactness on tiny models: tokens and logprobs are the same bits in every circumstance."""

from __future__ import annotations

import numpy as np
import pytest

from tests.exactness import Bench
from tests.tiny import build_tiny

SHAPES = {
    "grouped": {},
    "one head each": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "one shared head, bias, untied": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}
LENGTHS = (1, 2, 16, 17, 31, 100, 128, 129, 200)
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 1.2, "seed": 12, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
)


@pytest.fixture(scope="module", params=SHAPES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    shape = SHAPES[request.param]
    return Bench(build_tiny(tmp_path_factory.mktemp("tiny"), **shape))


@pytest.fixture(params=LENGTHS)
def length(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=SAMPLINGS, ids=("greedy", "plain", "full"))
def prompt(bench: Bench, length: int, request: pytest.FixtureRequest):
    ids = bench.random_ids(np.random.default_rng(length), length)
    return bench.request(ids, **request.param)


def test_neighbours_change_nothing(bench: Bench, prompt, length: int) -> None:
    want = bench.alone(prompt).bits
    for number in (1, 7, 15):
        rng = np.random.default_rng([length, number])
        before, after = bench.neighbours(rng, number // 2, 90), bench.neighbours(rng, number, 90)
        mine = bench.again(prompt)
        traces = bench.run(bench.engine(), before, [], [mine], after)
        assert traces[mine.request_id].bits == want


@pytest.mark.parametrize("chunk", [16, 24, 64])
def test_chunk_size_changes_nothing(bench: Bench, prompt, chunk: int) -> None:
    assert bench.alone(prompt, chunk=chunk).bits == bench.alone(prompt).bits


def test_prefix_hit_changes_nothing(bench: Bench, prompt, length: int) -> None:
    want = bench.alone(prompt).bits
    engine = bench.engine()
    for hits in (0, (length - 1) // bench.page_size * bench.page_size):
        mine = bench.again(prompt)
        trace = bench.run(engine, [mine])[mine.request_id]
        assert trace.stats is not None
        assert trace.stats.num_cached_tokens == hits
        assert trace.bits == want


def test_preemption_changes_nothing(bench: Bench, length: int) -> None:
    """The pool holds the first request and little more, so the second is preempted."""
    rng = np.random.default_rng(length)
    first = bench.request(bench.random_ids(rng, length), max_tokens=60, temperature=0.0)
    second = bench.request(bench.random_ids(rng, length), max_tokens=60, temperature=0.8, seed=3)
    num_pages = -(-(length + 60) // bench.page_size) + 2 + length // bench.page_size
    traces = bench.run(bench.engine(num_pages=num_pages), [first, second])
    preemptions = [trace.stats.num_preemptions for trace in traces.values() if trace.stats]
    assert sum(preemptions) >= 1
    for request in (first, second):
        assert traces[request.request_id].bits == bench.alone(request).bits


def test_reused_pages_change_nothing(bench: Bench, prompt) -> None:
    """Another order of pages, full of other sequences' leftovers, and eviction of cached ones."""
    want = bench.alone(prompt).bits
    rng = np.random.default_rng(8)
    engine = bench.engine(num_pages=40)
    bench.run(engine, bench.neighbours(rng, 12, 120), bench.neighbours(rng, 6, 120))
    mine = bench.again(prompt)
    assert bench.run(engine, [mine])[mine.request_id].bits == want


def test_choices_of_one_request_equal_themselves_in_any_company(bench: Bench) -> None:
    ids = bench.random_ids(np.random.default_rng(1), 40)
    request = bench.request(ids, temperature=1.0, seed=7, n=1)
    want = bench.alone(request).bits
    rng = np.random.default_rng(2)
    for _ in range(5):
        mine = bench.again(request)
        traces = bench.run(bench.engine(), bench.neighbours(rng, 4, 60), [mine])
        assert traces[mine.request_id].bits == want
