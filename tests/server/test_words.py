"""What is said to people: start-up lines, the status line, logs."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import sys

import pytest

from jaxinfer.server.logs import JsonFormatter, configure_logs
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.startup import config_line, exposure, ready_lines, route_line
from jaxinfer.server.status_line import StatusLine
from jaxinfer.stats import PoolStats, StepStats

IDLE = PoolStats(0, 0, 100, 0, 0, 100, 0, 0, 0)


def step(num_tokens: int, num_sampled: int) -> StepStats:
    return StepStats("prefill", num_sampled, num_tokens, num_tokens, num_sampled, 0.1)


def test_an_idle_engine_has_nothing_to_say():
    status = StatusLine(Metrics("m"), 0.0)
    assert status.line(IDLE, 10.0) is None


def test_the_status_line_gives_rates_since_the_line_before():
    metrics = Metrics("m")
    status = StatusLine(metrics, 0.0)
    busy = dataclasses.replace(
        IDLE, num_running=2, num_waiting=1, pages_used=25, prefix_query_tokens=200,
        prefix_hit_tokens=50,
    )  # fmt: skip
    metrics.on_step(step(110, 10), busy)
    assert status.line(busy, 10.0) == (
        "prompt 10.0 tok/s, generation 1.0 tok/s, running 2, waiting 1, KV 25%, prefix hit 25%"
    )
    metrics.on_step(step(20, 20), busy)
    assert status.line(busy, 20.0) == (
        "prompt 0.0 tok/s, generation 2.0 tok/s, running 2, waiting 1, KV 25%, prefix hit -"
    )
    assert status.line(IDLE, 30.0) is None


def test_work_that_began_and_ended_between_two_lines_is_told():
    metrics = Metrics("m")
    status = StatusLine(metrics, 0.0)
    metrics.on_step(step(5, 5), IDLE)
    assert status.line(IDLE, 5.0) is not None


def test_requests_that_only_wait_are_told():
    assert StatusLine(Metrics("m"), 0.0).line(dataclasses.replace(IDLE, num_waiting=3), 1.0)


def test_start_up_says_the_plan_and_the_seconds():
    summary = {
        "device": "cpu",
        "num_kv_tokens": 16384,
        "max_concurrency": 8.0,
        "max_model_len": 2048,
        "seconds": {"load weights": 1.25, "compile": 10.04},
    }
    assert list(ready_lines(summary, 11.5)) == [
        "device: cpu",
        "KV cache: 16,384 tokens; max concurrency for 2,048 tokens: 8.00",
        "start-up: load weights 1.2 s, compile 10.0 s, total 11.5 s",
    ]


def test_start_up_without_a_plan_still_says_the_seconds():
    assert list(ready_lines({}, 2.0)) == ["start-up: total 2.0 s"]


def test_the_configuration_is_one_line():
    line = config_line({"port": 1, "served_model_name": ("a", "b"), "api_key": "***"})
    assert line == "config: port=1 served_model_name=a,b api_key=***"


def test_the_route_line_names_the_main_routes():
    for path in ("/v1/chat/completions", "/v1/completions", "/metrics", "/health"):
        assert path in route_line()


@pytest.fixture
def root_logger():
    """The root logger, put back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {n: logging.getLogger(n).level for n in ("jaxinfer", "checkpoints", "pallas_kernels")}
    yield root
    root.handlers[:], root.level = handlers, level
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)


def test_json_logs_are_one_object_per_line(root_logger, monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs("info", "json")
    logging.getLogger("jaxinfer.x").info("hello %s", "wörld\nnext")
    logging.getLogger("jaxinfer.x").debug("not this")
    logging.getLogger("somebody.else").info("nor this")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {"level": "info", "logger": "jaxinfer.x", "message": "hello wörld\nnext"}


def test_json_logs_hold_the_traceback(root_logger):
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("n", 40, "f", 1, "failed", None, sys.exc_info())
    assert "ValueError: bad" in json.loads(JsonFormatter().format(record))["exception"]


def test_console_logs_are_short_lines(root_logger, monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs("warning", "console")
    logging.getLogger("jaxinfer.x").info("not this")
    logging.getLogger("somebody.else").warning("this")
    assert stream.getvalue().rstrip().endswith("WARNING this")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3", "fe80::1%eth0"])
def test_an_address_that_others_reach_without_a_key_is_warned_of(address: str):
    assert "set --api-key" in (exposure(address, has_keys=False) or "")
    assert exposure(address, has_keys=True) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1"])
def test_a_loopback_address_is_not_warned_of(address: str):
    assert exposure(address, has_keys=False) is None
