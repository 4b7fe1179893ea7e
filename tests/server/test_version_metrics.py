"""What is counted of each version, and that it goes with it."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.served_versions import ServedVersions
from jaxinfer.stats import PoolStats, RequestStats, StepStats
from tests.server.house import MODEL, House, open_house

POOL = PoolStats(3, 2, 10, 4, 5, 1, 7, 100, 60, 6)


def model(version: str, weights_bytes: int = 0) -> Any:
    return SimpleNamespace(
        version=version, root=f"at/{version}", weights_bytes=weights_bytes, engine=None
    )


def samples(metrics: Metrics) -> dict[str, float]:
    """name[version=v1,...] -> value, of metrics by version."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            if "version" in labels and not sample.name.endswith("_created"):
                words = ",".join([labels.pop("version"), *labels.values()])
                found[f"{sample.name.removeprefix('jaxinfer:')}[{words}]"] = sample.value
    return found


def step(version: str, num_tokens: int = 8, num_sampled: int = 2) -> StepStats:
    return StepStats("decode", num_sampled, num_tokens, 8, num_sampled, 0.1, version)


def ended(version: str) -> RequestStats:
    return RequestStats(5, 0, 4, 0, 1.0, 1.5, 2.0, 3.0, version)


@pytest.fixture
def versions() -> ServedVersions:
    """v1 is stable, v2 is tried by a quarter."""
    found = ServedVersions()
    found.serve(model("v1", 1000))
    found.add(model("v2", 500))
    found.try_out("v2", 0.25)
    return found


def test_each_version_counts_for_itself(versions: ServedVersions):
    metrics = Metrics("m")
    metrics.watch_versions(versions)
    metrics.on_step(step("v1"), POOL)
    for _ in range(2):
        metrics.on_step(step("v2", 16, 3), POOL)
    metrics.on_finish(ended("v2"), FinishReason.STOP)
    metrics.on_finish(ended("v2"), FinishReason.ABORT)
    metrics.on_first_token(0.5, "v1")
    metrics.on_gap(0.3, 3, "v2")
    metrics.on_failed_step("v2")
    found = samples(metrics)
    assert [found[f"version_steps_total[{v}]"] for v in ("v1", "v2")] == [1, 2]
    assert [found[f"version_failed_steps_total[{v}]"] for v in ("v1", "v2")] == [0, 1]
    assert [found[f"version_generation_tokens_total[{v}]"] for v in ("v1", "v2")] == [2, 6]
    assert [found[f"version_computed_tokens_total[{v}]"] for v in ("v1", "v2")] == [8, 32]
    assert found["version_ended_total[v2,stop]"] == found["version_ended_total[v2,abort]"] == 1
    assert found["version_ended_total[v1,stop]"] == 0
    assert found["version_time_to_first_token_seconds_sum[v1]"] == 0.5
    assert found["version_time_to_first_token_seconds_count[v2]"] == 0
    assert found["version_inter_token_latency_seconds_count[v2]"] == 3
    assert found["version_inter_token_latency_seconds_sum[v2]"] == pytest.approx(0.3)
    assert [found[f"version_share[{v}]"] for v in ("v1", "v2")] == [0.75, 0.25]
    assert found["version_role[v1,stable]"] == found["version_role[v2,canary]"] == 1
    assert [found[f"version_weights_bytes[{v}]"] for v in ("v1", "v2")] == [1000, 500]


def test_series_go_with_their_version_and_a_new_one_begins_at_0(versions: ServedVersions):
    metrics = Metrics("m")
    metrics.watch_versions(versions)
    metrics.on_step(step("v2"), POOL)
    both = samples(metrics)
    versions.remove("v2")
    assert samples(metrics)["version_role[v2,leaving]"] == 1
    asyncio.run(versions.wait_until_unused("v2"))
    metrics.on_finish(ended("v2"), FinishReason.ABORT)  # told late
    left = samples(metrics)
    assert not [name for name in left if re.search(r"\bv2\b", name)]
    assert len([n for n in both if "v1" in n]) == len(left) == 18
    versions.add(model("v2"))
    assert samples(metrics)["version_steps_total[v2]"] == 0


def test_the_shown_version_is_the_stable_one(versions: ServedVersions):
    metrics = Metrics("m")
    metrics.watch_versions(versions)
    assert samples(metrics)["weights_version_info[v1]"] == 1
    versions.serve(versions.choose("", "v2"))
    found = samples(metrics)
    assert found["weights_version_info[v2]"] == 1
    assert "weights_version_info[v1]" not in found


def test_before_there_is_a_model_there_is_no_version():
    assert samples(Metrics("m")) == {}
    assert Metrics("m").by_version() == []


def test_counters_of_two_pools_do_not_mix():
    """Each engine's pool counts since its own start."""
    metrics = Metrics("m")
    second = metrics.for_engine()
    small = PoolStats(0, 0, 10, 0, 0, 10, 1, 10, 6)
    metrics.on_step(step("v1"), POOL)
    second.on_step(step("v2"), small)
    metrics.on_step(step("v1"), POOL)
    text = metrics.render().decode()
    totals = {
        name: float(re.findall(rf"jaxinfer:{name}_total{{.*}} (.*)", text)[0])
        for name in (
            "num_preemptions",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "padded_tokens",
        )
    }
    assert list(totals.values()) == [8, 110, 66, 24]
    assert metrics.tokens_sampled == 6


def test_pools_add_up():
    assert PoolStats.total([POOL]) == POOL
    assert PoolStats.total([POOL, POOL]) == PoolStats(6, 4, 20, 8, 10, 2, 14, 200, 120, 12)


def row(house: House, version: str) -> dict[str, Any]:
    rows = house.state.metrics.by_version()
    return next(r for r in rows if r["version"] == version)


@pytest.mark.parametrize("manner", ["beside", "engine"])
def test_each_version_has_a_row_of_its_numbers(manner: str):
    with open_house() as house:
        add = house.add_version if manner == "beside" else house.add_engine
        add("v2", share=0.0)
        for version, number in (("v1", 1), ("v2", 2)):
            for _ in range(number):
                house.post("/v1/completions", {"model": f"{MODEL}@{version}", "prompt": "3"})
        house.wait_until(lambda: row(house, "v2")["ended"]["stop"] == 2)
        first, second = row(house, "v1"), row(house, "v2")
        assert (first["role"], second["role"]) == ("stable", "canary")
        assert (first["share"], second["share"]) == (1.0, 0.0)
        assert (first["root"], second["root"]) == ("tests/letters", "tests/v2")
        assert first["ended"]["stop"] == 1
        # 3 is followed by 2, 1, 0 and the end; or by 1 and the end
        assert (first["generation_tokens"], second["generation_tokens"]) == (4, 4)
        assert first["time_to_first_token_seconds"]["count"] == 1
        assert second["time_to_first_token_seconds"]["count"] == 2
        assert second["inter_token_latency_seconds"]["count"] == 2
        house.wait_until(lambda: row(house, "v2")["open_calls"] == 0)
        house.wait_until_idle()


def test_pool_gauges_are_of_all_engines_together():
    with open_house(num_pages=64) as house:
        free = house.metric("kv_pages")
        house.add_engine("v2", num_pages=32)
        assert house.metric("kv_pages") == free + 32
        house.wait_until_idle()
