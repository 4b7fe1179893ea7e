"""Memory by kind, added up by hand."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from jaxinfer.server import memory_metrics
from jaxinfer.server.memory_metrics import KINDS, MemoryMetrics
from jaxinfer.server.metric_maker import MetricMaker
from jaxinfer.server.process_memory import peak_resident_bytes, resident_bytes
from jaxinfer.stats import PoolStats

POOL = PoolStats(1, 0, 10, 4, 5, 1, 0, 0, 0)
PLAN = {"weights": 500, "programs": 20, "kv_pool": 1000}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryMetrics:
    monkeypatch.setattr(memory_metrics, "resident_bytes", lambda: 2000)
    monkeypatch.setattr(memory_metrics, "peak_resident_bytes", lambda: 2500)
    return MemoryMetrics(MetricMaker(CollectorRegistry(), {"model_name": "m"}))


def test_the_pool_is_divided_by_its_pages(memory: MemoryMetrics):
    memory.on_loaded(lambda: PLAN)
    sizes = memory.by_kind(POOL)
    assert set(sizes) == set(KINDS)
    assert (sizes["kv_used"], sizes["kv_cached"], sizes["kv_free"]) == (400, 500, 100)
    assert (sizes["weights"], sizes["programs"], sizes["kv_pool"]) == (500, 20, 1000)
    assert (sizes["host_rss"], sizes["host_rss_peak"]) == (2000, 2500)


def test_on_a_gpu_all_that_is_resident_is_the_process(memory: MemoryMetrics):
    memory.on_loaded(lambda: PLAN)
    assert memory.by_kind(POOL)["process"] == 2000


def test_on_a_cpu_the_process_is_what_is_none_of_the_plan(memory: MemoryMetrics):
    memory.on_loaded(lambda: PLAN | {"process": 300})
    assert memory.by_kind(POOL)["process"] == 2000 - 1520


def test_memory_that_was_planned_and_not_touched_leaves_no_negative_rest(memory: MemoryMetrics):
    memory.on_loaded(lambda: PLAN | {"process": 300, "kv_pool": 9000})
    assert memory.by_kind(POOL)["process"] == 0


def test_an_engine_that_comes_and_goes_is_none_of_the_process(memory: MemoryMetrics):
    now = PLAN | {"process": 300}
    memory.on_loaded(lambda: now)
    now = now | {"programs": 40, "kv_pool": 1400}
    sizes = memory.by_kind(POOL)
    assert (sizes["kv_used"], sizes["kv_pool"], sizes["process"]) == (560, 1400, 2000 - 1940)


def test_before_there_is_a_model_only_the_process_is_known(memory: MemoryMetrics):
    sizes = memory.by_kind(None)
    assert sizes.pop("process") == sizes.pop("host_rss") == 2000
    assert sizes.pop("host_rss_peak") == 2500
    assert set(sizes.values()) == {0}


def test_the_peak_stays_when_memory_is_given_back():
    held = bytearray(b"x") * (48 * 2**20)
    most = resident_bytes()
    del held
    assert peak_resident_bytes() >= most - 2**20
