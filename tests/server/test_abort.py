"""Calls that their callers end: by the reply's id or their own, in every phase."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jaxinfer.server.edge import Edge
from jaxinfer.server.forecast import Leaving, Ticket
from tests.server.house import House, open_house
from tests.server.test_disconnect import SlowTokenizer

LONG = {"prompt": "a", "max_tokens": 200}


def abort(house: House, request_id: str, **headers: str) -> int:
    reply = house.post("/abort_request", {"request_id": request_id}, headers=headers)
    assert reply.status_code == 200
    return reply.json()["aborted"]


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def call(house: House, **fields: Any) -> httpx.Response:
    headers = {"x-request-id": "mine"}
    return httpx.post(
        f"{house.url}/v1/completions", json={**LONG, **fields}, headers=headers, timeout=20
    )


def is_answered(answer: Future[httpx.Response]) -> list[dict[str, Any]]:
    reply = answer.result(10)
    assert reply.status_code == 200
    choices = reply.json()["choices"]
    assert {c["finish_reason"] for c in choices} == {"abort"}
    return choices


def test_an_aborted_stream_ends_with_its_text_one_finish_reason_per_index_usage_and_done():
    with open_house() as house:
        house.runner.step_s = 0.01
        body = {**LONG, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        with house.client.stream("POST", f"{house.url}/v1/completions", json=body) as reply:
            found: list[Any] = []
            for event in events(reply.iter_lines()):
                found.append(event)
                if len(found) == 3:
                    assert abort(house, event["id"]) == 1
        *chunks, usage, done = found
        assert done == "[DONE]"
        assert usage["choices"] == []
        ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert sorted((c["index"], c["finish_reason"]) for c in ends) == [
            (0, "abort"),
            (1, "abort"),
        ]
        texts = [
            "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == i)
            for i in (0, 1)
        ]
        assert all("bcdefghijklmnopqrstuvwxyz".startswith(text[:25]) for text in texts)
        assert usage["usage"]["completion_tokens"] == sum(map(len, texts)) < 400
        house.wait_until_idle(1.0)
        assert house.metric("aborted_total") == 2


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b"], "n": 2}])
def test_an_aborted_call_that_is_not_streamed_answers_with_what_there_is(fields: dict[str, Any]):
    with open_house() as house, ThreadPoolExecutor(1) as pool:
        house.runner.step_s = 0.005
        answer = pool.submit(call, house, **fields)
        house.wait_until(lambda: house.engine.pool_stats.num_running > 0)
        time.sleep(0.03)
        num_steps = house.runner.num_steps
        assert abort(house, "mine") == 1
        is_answered(answer)
        house.wait_until_idle(1.0)
        assert house.runner.num_steps - num_steps <= 4
        assert len(house.state.calls) == 0


def test_neither_an_aborted_call_nor_an_echo_tells_how_long_requests_take(
    monkeypatch: pytest.MonkeyPatch,
):
    left: list[str] = []
    with open_house() as house, ThreadPoolExecutor(1) as pool:
        forecast = house.state.admission.forecast
        leave = forecast.leave

        def noted(ticket: Ticket, how: Leaving) -> None:
            left.append(how)
            leave(ticket, how)

        monkeypatch.setattr(forecast, "leave", noted)
        house.runner.step_s = 0.005
        answer = pool.submit(call, house)
        house.wait_until(lambda: house.engine.pool_stats.num_running > 0)
        assert abort(house, "mine") == 1
        is_answered(answer)
        house.complete("a", echo=True, max_tokens=0)
        house.complete("a", max_tokens=1)
        assert left == ["left", "left", "ended"]


def test_a_call_is_aborted_while_its_prompt_is_tokenized():
    tokenizer = SlowTokenizer()
    with open_house(tokenizer=tokenizer) as house, ThreadPoolExecutor(1) as pool:
        tokenizer.gate.clear()
        answer = pool.submit(call, house)
        house.wait_until(lambda: bool(tokenizer.threads))
        assert abort(house, "mine") == 1
        tokenizer.gate.set()
        assert [c["text"] for c in is_answered(answer)] == [""]
        house.wait_until_idle(1.0)
        assert house.runner.num_steps == 0


def test_a_call_is_aborted_while_it_waits_and_during_its_prefill():
    with open_house(max_num_seqs=1) as house, ThreadPoolExecutor(2) as pool:
        house.runner.gate.clear()
        running = pool.submit(call, house)
        house.wait_until(lambda: house.engine.num_open == 1)
        waiting = pool.submit(call, house)
        house.wait_until(lambda: house.engine.num_open == 2)
        assert abort(house, "mine") == 2  # both bear this name
        assert abort(house, "mine") == 0
        house.runner.gate.set()
        for answer in (running, waiting):
            is_answered(answer)
        house.wait_until_idle(1.0)


def test_an_id_that_is_not_known_or_has_ended_aborts_nothing():
    with open_house() as house:
        reply = house.complete("a")
        assert abort(house, reply.json()["id"]) == 0
        assert abort(house, "nobody") == 0
        assert house.post("/abort_request", {}).status_code == 400
        assert house.post("/abort_request", {"request_id": 1}).status_code == 400


def test_only_the_key_of_a_call_may_abort_it():
    with open_house(api_keys=("one", "two")) as house, ThreadPoolExecutor(1) as pool:
        house.runner.gate.clear()
        mine = {"authorization": "Bearer one", "x-request-id": "mine"}
        answer = pool.submit(
            lambda: httpx.post(f"{house.url}/v1/completions", json=LONG, headers=mine, timeout=20)
        )
        house.wait_until(lambda: house.engine.num_open == 1)
        assert house.post("/abort_request", {"request_id": "mine"}).status_code == 401
        assert abort(house, "mine", authorization="Bearer two") == 0
        assert abort(house, "mine", authorization="Bearer one") == 1
        house.runner.gate.set()
        is_answered(answer)


def test_an_admin_key_aborts_the_calls_of_every_key():
    with (
        open_house(api_keys=("one",), edge=Edge(admin_keys=("boss",))) as house,
        ThreadPoolExecutor(1) as threads,
    ):
        house.runner.step_s = 0.02
        headers = {"x-request-id": "mine", "authorization": "Bearer one"}
        url = f"{house.url}/v1/completions"
        answer = threads.submit(httpx.post, url, json=LONG, headers=headers, timeout=20)
        house.wait_until(lambda: house.engine.pool_stats.num_running == 1)
        assert abort(house, "mine", authorization="Bearer boss") == 1
        is_answered(answer)


def test_an_abort_needs_no_room():
    with open_house() as house, ThreadPoolExecutor(1) as pool:
        house.runner.gate.clear()
        answer = pool.submit(call, house)
        house.wait_until(lambda: house.engine.num_open == 1)
        house.state.admission.max_requests = 1
        assert house.complete("a").status_code == 429
        assert abort(house, "mine") == 1
        house.runner.gate.set()
        is_answered(answer)
