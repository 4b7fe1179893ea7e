"""Calls to the scripted server of tests/server, whose texts can be worked out by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from bench.service.client import Call, Reply, send
from bench.service.mixture import CHAT, COMPLETIONS, bad_call, good_calls
from tests.server.house import House, open_house


@pytest.fixture(scope="module")
def house():
    with open_house() as house:
        yield house


def reply_to(house: House, call: Call) -> Reply:
    async def run() -> Reply:
        async with httpx.AsyncClient(base_url=house.url, trust_env=False) as client:
            return await send(client, call)

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_has_text_log_probabilities_reason_and_tokens(house: House, stream: bool):
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "logprobs": 1, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    reply = reply_to(house, Call(COMPLETIONS, body))
    assert reply.ending == "done"
    assert reply.said == ({0: "bcd"}, {0: [-0.5] * 3}, {0: "length"}, 3)
    assert (reply.ttft_s is not None) == stream


def test_each_choice_of_a_chat_has_its_own_text(house: House):
    messages = [{"role": "user", "content": "2"}]
    reply = reply_to(house, Call(CHAT, {"messages": messages, "n": 2, "logprobs": True}))
    assert reply.texts == {0: "10", 1: "10"}
    assert reply.reasons == {0: "stop", 1: "stop"}
    assert reply.logprobs == {0: [-0.5] * 3, 1: [-0.5] * 3}


def test_a_refusal_has_its_status_and_code(house: House):
    reply = reply_to(house, Call(COMPLETIONS, {"prompt": "a", "model": "none"}))
    assert (reply.ending, reply.status, reply.error) == ("refused", 404, "model_not_found")


def test_a_client_that_leaves_is_told_from_one_that_was_failed(house: House):
    house.runner.step_s = 0.02
    call = Call(COMPLETIONS, {"prompt": "a", "max_tokens": 200}, leaves_after_s=0.05)
    assert reply_to(house, call).ending == "left"
    house.runner.step_s = 0.0
    house.wait_until_idle()


def test_nobody_there_is_a_failure():
    async def run() -> Reply:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as client:
            return await send(client, Call(COMPLETIONS, {}))

    reply = asyncio.run(run())
    assert (reply.ending, reply.status, reply.error) == ("failed", 0, "ConnectError")


def test_good_calls_differ_and_are_the_same_each_time():
    calls = good_calls(50, seed=1)
    assert calls == good_calls(50, seed=1)
    assert len({str(call.body) for call in calls}) == 50


def test_bad_calls_are_refused(house: House):
    from random import Random

    random = Random(2)
    statuses = {reply_to(house, bad_call(random)).status for _ in range(60)}
    assert statuses == {400, 404}
