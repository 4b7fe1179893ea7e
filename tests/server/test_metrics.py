"""Numbers that can be added up by hand, and a number of series that never grows."""

from __future__ import annotations

import secrets

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.histogram import Histogram, one_two_five
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.process_memory import resident_bytes
from jaxinfer.stats import PoolStats, RequestStats, StepStats
from tests.server.house import House, open_house

POOL = PoolStats(
    num_running=3,
    num_waiting=2,
    pages_total=10,
    pages_used=4,
    pages_cached=5,
    pages_free=1,
    num_preemptions=7,
    prefix_query_tokens=100,
    prefix_hit_tokens=60,
    num_paused=6,
)


def samples(metrics: Metrics) -> dict[str, float]:
    """Name and labels, but for the model's, -> value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            name = sample.name.removeprefix("jaxinfer:")
            found[f"{name}[{labels}]" if labels else name] = sample.value
    return found


def compilations(metrics: Metrics) -> list[float]:
    found = samples(metrics)
    return [found[f"compile_events_total[phase={phase}]"] for phase in ("startup", "serving")]


def step(num_tokens: int, num_padded: int, num_sampled: int) -> StepStats:
    return StepStats("decode", num_sampled, num_tokens, num_padded, num_sampled, 0.01)


def ended(num_prompt: int = 10, num_output: int = 5) -> RequestStats:
    return RequestStats(num_prompt, 0, num_output, 0, 1.0, 1.5, 2.0, 4.0)


def test_steps_are_counted():
    metrics = Metrics("m")
    metrics.on_step(step(6, 8, 6), POOL)
    metrics.on_step(step(30, 40, 2), POOL)
    found = samples(metrics)
    assert found["generation_tokens_total"] == 8
    assert found["computed_tokens_total"] == 36
    assert found["padded_tokens_total"] == 48
    assert found["padding_waste_ratio"] == 0.25
    assert found["iteration_tokens_total_count"] == 2
    assert found["iteration_tokens_total_sum"] == 36
    assert (metrics.tokens_sampled, metrics.tokens_computed) == (8, 36)


def test_counters_since_start_are_not_counted_twice():
    metrics = Metrics("m")
    metrics.on_step(step(1, 8, 1), POOL)
    metrics.on_step(step(1, 8, 1), POOL)
    found = samples(metrics)
    assert found["num_preemptions_total"] == 7
    assert found["prefix_cache_queries_total"] == 100
    assert found["prefix_cache_hits_total"] == 60


def test_gauges_are_read_at_the_scrape():
    metrics, compiled = Metrics("m"), {"startup": 9, "serving": 0}
    memory = {"weights": 500, "kv_pool": 1000}
    metrics.on_loaded(
        version="v9",
        cache_config={"page_size": 64, "num_pages": 10},
        memory_source=lambda: memory,
        startup_s={"load": 1.5, "total": 2.5},
        pool_source=lambda: POOL,
        compile_source=lambda: compiled,
    )
    found = samples(metrics)
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 2
    assert found["num_requests_paused"] == 6
    assert found["kv_cache_usage_perc"] == 0.4
    assert [found[f"kv_pages[state={s}]"] for s in ("used", "cached", "free")] == [4, 5, 1]
    assert found["startup_seconds[phase=load]"] == 1.5
    assert found["weights_version_info[version=v9]"] == 1
    assert found["memory_bytes[kind=weights]"] == 500
    assert found["memory_bytes[kind=kv_pool]"] == 1000
    assert compilations(metrics) == [9, 0]
    compiled["serving"] = 2
    assert compilations(metrics) == compilations(metrics) == [9, 2]
    assert found["cache_config_info[num_pages=10,page_size=64]"] == 1
    assert found["process_resident_memory_bytes"] > 2**20


def test_ends_are_counted_by_reason_and_aborts_apart():
    metrics = Metrics("m")
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        metrics.on_finish(ended(), reason)
    found = samples(metrics)
    assert found["request_success_total[finished_reason=stop]"] == 2
    assert found["request_success_total[finished_reason=length]"] == 1
    assert found["request_success_total[finished_reason=error]"] == 0
    assert found["aborted_total"] == 1
    assert found["prompt_tokens_total"] == 40


def test_latencies_of_an_ended_request():
    metrics = Metrics("m")
    metrics.on_finish(ended(), FinishReason.STOP)
    found = samples(metrics)
    assert found["request_queue_time_seconds_sum"] == 0.5
    assert found["request_prefill_time_seconds_sum"] == 0.5
    assert found["request_decode_time_seconds_sum"] == 2.0
    assert found["e2e_request_latency_seconds_sum"] == 3.0
    assert found["request_prompt_tokens_bucket[le=10.0]"] == 1
    assert found["request_prompt_tokens_bucket[le=5.0]"] == 0


def test_a_request_that_never_ran_has_no_prefill_time():
    metrics = Metrics("m")
    metrics.on_finish(RequestStats(5, 0, 0, 0, 1.0, None, None, 3.0), FinishReason.TIMEOUT)
    found = samples(metrics)
    assert found["request_prefill_time_seconds_count"] == 0
    assert found["request_queue_time_seconds_sum"] == 2.0


def test_a_gap_of_several_tokens_counts_for_each():
    metrics = Metrics("m")
    metrics.on_gap(0.03, 3, "v1")
    metrics.on_first_token(0.2, "v1")
    found = samples(metrics)
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.03)
    assert found["inter_token_latency_seconds_bucket[le=0.01]"] == 3
    assert found["time_to_first_token_seconds_bucket[le=0.1]"] == 0
    assert found["time_to_first_token_seconds_bucket[le=0.25]"] == 1


def test_before_the_model_is_there_nothing_was_compiled():
    assert compilations(Metrics("m")) == [0, 0]


def test_refusals_are_counted_by_our_own_words_only():
    metrics = Metrics("m")
    metrics.on_reject("overloaded")
    assert samples(metrics)["rejected_total[reason=overloaded]"] == 1
    with pytest.raises(KeyError):
        metrics.on_reject("whatever a client sent")


def test_two_servers_in_one_process_do_not_share_numbers():
    first, second = Metrics("m"), Metrics("m")
    first.on_step(step(5, 8, 5), POOL)
    assert samples(second)["generation_tokens_total"] == 0


def test_a_histogram_is_cumulative_and_ends_with_all():
    registry = CollectorRegistry()
    histogram = Histogram("h", "text", (1.0, 2.0, 5.0), labels={"l": "x"}, registry=registry)
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.observe(value, times)
    (family,) = histogram.collect()
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "h_bucket"}
    assert buckets == {"1.0": 3, "2.0": 4, "5.0": 4, "+Inf": 7}
    assert [s.value for s in family.samples if s.name == "h_sum"] == [0.5 + 2 + 1.5 + 27]
    assert [s.value for s in family.samples if s.name == "h_count"] == [7]


def test_token_buckets_go_in_steps_of_1_2_5_past_their_limit():
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(101)[-1] == 200
    assert one_two_five(1) == (1,)


def test_resident_memory_grows_with_what_is_held():
    before = resident_bytes()
    held = bytearray(b"x") * (64 * 2**20)
    assert resident_bytes() - before > 32 * 2**20
    del held


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_neither_paths_nor_model_names_of_clients_add_series(count: int):
    with open_house() as house:
        house.complete("a")
        before = number_of_series(house)
        for _ in range(count):
            name = secrets.token_urlsafe(8)
            house.get(f"/{name}/{name}")
            house.post("/v1/completions", {"model": name, "prompt": "a"})
        house.get(f"/v1/models/{secrets.token_urlsafe(8)}")
        assert number_of_series(house) == before
        assert house.metric("rejected_total") == count + 1


def number_of_series(house: House) -> int:
    lines = house.get("/metrics").text.splitlines()
    return sum(1 for line in lines if line and not line.startswith("#"))


def test_metrics_of_a_served_request_are_there_when_it_has_been_answered():
    with open_house() as house:
        house.complete("a", max_tokens=5)
        assert house.metric("generation_tokens_total") == 5
        assert house.metric("prompt_tokens_total") == 1
        assert house.metric("time_to_first_token_seconds_count") == 1
        assert house.metric("inter_token_latency_seconds_count") == 4
