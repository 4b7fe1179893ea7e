"""Steps fail, hang and take the pool along, as clients see it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jaxinfer.errors import PoolLost
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.server.state import Limits
from tests.fakes import FakeClock
from tests.server.house import House, open_house

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def fail_in_steps(house: House, errors: dict[int, Exception]) -> None:
    """The n-th step from now raises errors[n] when it is read."""
    collect, lock, seen = house.runner.collect, threading.Lock(), [0]

    def failing(pending: Batch) -> StepResult:
        with lock:
            number = seen[0]
            seen[0] += 1
        if number in errors:
            raise errors[number]
        return collect(pending)

    house.runner.collect = failing


def text_of(reply: httpx.Response) -> str:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


@pytest.mark.parametrize("error", [RuntimeError("bad step"), PoolLost("the pool is gone")])
def test_a_stream_over_a_failing_step_goes_on_unbroken(error: Exception):
    with open_house() as house, ThreadPoolExecutor() as pool:
        fail_in_steps(house, {3: error, 5: error, 11: error})
        replies = [pool.submit(house.complete, c, max_tokens=20, stream=True) for c in "abc"]
        texts = [text_of(future.result()) for future in replies]
        assert texts == [ALPHABET[i + 1 : i + 21] for i in range(3)]
        assert house.metric("request_retries_total") > 0
        assert house.metric("engine_rebuilds_total") == house.runner.num_rebuilds
        assert (house.runner.num_rebuilds == 3) == isinstance(error, PoolLost)
        assert house.metric("request_success_total") == 3
        house.wait_until_idle()


def test_a_crash_of_the_engine_thread_is_survived(monkeypatch: pytest.MonkeyPatch):
    """By a fault of our own code, in and outside of a step."""
    with open_house() as house, ThreadPoolExecutor() as pool:
        house.runner.step_s = 0.01
        replies = [pool.submit(house.complete, c, max_tokens=9, stream=True) for c in "abc"]
        house.wait_until(lambda: house.runner.num_steps > 2)

        def crash(*_: Any) -> Any:
            raise ZeroDivisionError("by hand")

        monkeypatch.setattr(house.scheduler, "schedule", crash)
        house.wait_until(lambda: house.runner.num_rebuilds == 1)
        monkeypatch.setattr(house.scheduler, "has_work", crash)
        texts = [text_of(future.result()) for future in replies]
        assert texts == [ALPHABET[i + 1 : i + 10] for i in range(3)]
        assert house.runner.num_rebuilds == 2
        assert house.get("/health").status_code == 200
        house.wait_until_idle()


def test_without_retries_a_failing_step_is_told_at_once():
    with open_house(max_retries=0) as house:
        fail_in_steps(house, {0: RuntimeError("bad step")})
        reply = house.complete("a")
        assert reply.status_code == 500
        assert "1 of 1 tries" in reply.json()["error"]["message"]
        assert house.complete("a").status_code == 200


def test_the_breaker_opens_lets_one_try_and_closes():
    limits, clock = Limits(breaker_threshold=3, breaker_open_s=10.0), FakeClock(100.0)
    with open_house(limits=limits) as house, ThreadPoolExecutor() as pool:
        house.state.breaker._clock = clock
        assert house.metric("circuit_breaker_state") == 0
        house.runner.fail_with = RuntimeError("bad step")
        assert house.complete("a").status_code == 500  # after three tries
        refused = house.complete("a")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "breaker_open"
        assert refused.headers["retry-after"] == "10"
        assert house.get("/ready").status_code == 503
        assert house.get("/health").status_code == 200
        assert house.metric("circuit_breaker_state") == 2
        metrics = house.get("/metrics").text
        assert 'rejected_total{model_name="letters",reason="breaker_open"} 1.0' in metrics
        clock.now += 10.0
        assert house.metric("circuit_breaker_state") == 1
        assert house.get("/ready").status_code == 200
        assert house.complete("a").status_code == 500  # the one that tries
        assert house.complete("a").json()["error"]["code"] == "breaker_open"
        clock.now += 10.0
        house.runner.fail_with = None
        house.runner.gate.clear()
        probe = pool.submit(house.complete, "a")
        house.wait_until(lambda: house.engine.num_open == 1)
        assert house.complete("a").json()["error"]["code"] == "breaker_open"
        house.runner.gate.set()
        assert probe.result().status_code == 200
        assert house.metric("circuit_breaker_state") == 0
        assert house.complete("a").status_code == 200
        house.wait_until_idle()


def test_running_requests_go_on_while_the_breaker_is_open():
    with open_house(limits=Limits(breaker_open_s=60.0)) as house, ThreadPoolExecutor() as pool:
        house.runner.step_s = 0.01
        running = pool.submit(house.complete, "a", max_tokens=20, stream=True)
        house.wait_until(lambda: house.runner.num_steps > 2)
        house.loop.call_soon_threadsafe(lambda: house.state.breaker.look(1e9))
        house.wait_until(lambda: house.state.breaker.state == 2)
        assert house.complete("a").status_code == 503
        assert text_of(running.result()) == ALPHABET[1:21]


def test_a_hanging_step_opens_the_breaker_and_its_request_goes_on():
    limits = Limits(step_timeout_s=0.2, breaker_open_s=0.2)
    with open_house(limits=limits) as house, ThreadPoolExecutor() as pool:
        house.wait_until(lambda: house.get("/ready").status_code == 200)
        house.runner.gate.clear()
        hanging = pool.submit(house.complete, "a", max_tokens=5)
        house.wait_until(lambda: house.get("/health").status_code == 503)
        refused = house.complete("a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "breaker_open")
        house.runner.gate.set()
        assert hanging.result().json()["choices"][0]["text"] == "bcdef"
        house.wait_until(lambda: house.complete("a").status_code == 200)
        assert house.metric("circuit_breaker_state") == 0
