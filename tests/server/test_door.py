"""A pause refuses nobody: calls wait before they get a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxinfer.server.state import Limits
from tests.server.house import open_house


def test_a_call_waits_while_the_door_is_shut_and_others_are_refused_when_it_is_barred():
    with open_house() as house, ThreadPoolExecutor(2) as pool:
        door = house.state.door
        house.on_loop(lambda: door.shut("a version is streamed in"))
        calls = [pool.submit(house.complete, max_tokens=3) for _ in range(2)]
        house.wait_until(lambda: house.state.admission.num_open == 2)
        assert house.engine.num_open == 0
        assert house.get("/health").status_code == 200
        house.on_loop(door.open)
        assert [call.result(5).json()["choices"][0]["text"] for call in calls] == ["bcd"] * 2

        house.on_loop(lambda: door.shut("another one"))
        waiting = pool.submit(house.complete, max_tokens=3)
        house.wait_until(lambda: house.state.admission.num_open == 1)
        house.on_loop(lambda: door.bar("the weights are lost"))
        for reply in (waiting.result(5), house.complete(max_tokens=3)):
            assert reply.status_code == 503
            assert reply.json()["error"]["message"] == "the weights are lost"
        assert house.get("/health").status_code == 503


def test_who_waits_at_the_door_is_answered_in_time_and_who_leaves_gives_up_the_seat():
    with open_house() as house, ThreadPoolExecutor(2) as pool:
        house.on_loop(lambda: house.state.door.shut("a version is streamed in"))
        late = house.complete(max_tokens=3, timeout=0.05)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "a version is streamed in" in late.json()["error"]["message"]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{house.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=0.05
            )
        house.wait_until(lambda: house.state.admission.num_open == 0)
        patient = pool.submit(house.complete, max_tokens=3, timeout=5)
        house.wait_until(lambda: house.state.admission.num_open == 1)
        house.on_loop(house.state.door.open)
        assert patient.result(5).json()["choices"][0]["text"] == "bcd"


def test_a_class_that_waits_no_longer_in_a_queue_is_told_to_come_again():
    limits = Limits(queue_timeout_s=0.05)
    with open_house(limits=limits) as house:
        house.on_loop(lambda: house.state.door.shut("a version is streamed in"))
        reply = house.complete(max_tokens=3)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_timeout")
        assert int(reply.headers["retry-after"]) > 0
