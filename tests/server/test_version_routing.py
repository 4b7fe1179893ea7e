"""Which version of the weights answers a call, as clients see it.

v1 counts a b c d; v2, of the same engine or of another, leaves one letter out: a c e g.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxinfer.canary.facts import RequestFacts
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.answered import Answered
from jaxinfer.server.edge import Edge
from tests.server.house import MODEL, House, open_house

SAYS = {"v1": "bcde", "v2": "cegi"}  # after "a"
HEADER = "x-jaxinfer-version"


@pytest.fixture(scope="module", params=["beside", "engine"])
def both_house(request: pytest.FixtureRequest) -> Iterator[House]:
    with open_house(edge=Edge(cors_origins=("https://a.example",))) as house:
        add = house.add_version if request.param == "beside" else house.add_engine
        add("v2", share=0.0)
        yield house


@pytest.fixture
def house(both_house: House) -> Iterator[House]:
    """Of two versions; v2 is a canary without a share."""
    yield both_house
    both_house.on_loop(lambda: both_house.state.versions.try_out("v2", 0.0))
    both_house.wait_until_idle()


def share(house: House, value: float) -> None:
    house.on_loop(lambda: house.state.versions.try_out("v2", value))


def ask(house: House, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """The version that answered, which text, fingerprint and header agree about."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4, "temperature": 0, **fields}
    reply = house.post("/v1/completions", body, headers=headers or {})
    assert reply.status_code == 200, reply.text
    version = reply.headers[HEADER]
    assert reply.json()["system_fingerprint"] == version
    assert reply.json()["choices"][0]["text"] == SAYS[version]
    return version


def test_calls_go_to_the_stable_version_as_long_as_nothing_is_tried(house: House):
    assert {ask(house, user=f"u{i}") for i in range(8)} == {"v1"}


def test_a_pin_by_header_and_by_model_name(house: House):
    assert ask(house, {HEADER: "v2"}) == "v2"
    assert ask(house, model=f"{MODEL}@v2") == "v2"
    share(house, 1.0)
    assert ask(house) == "v2"
    assert ask(house, {HEADER: "v1"}) == "v1"
    assert ask(house, {HEADER: "v1"}, model=f"{MODEL}@v1") == "v1"


def test_pins_that_cannot_be_are_refused_by_name(house: House):
    by_header = house.post("/v1/completions", {"prompt": "a"}, headers={HEADER: "v9"})
    by_name = house.post("/v1/completions", {"prompt": "a", "model": f"{MODEL}@v9"})
    for reply, param in ((by_header, HEADER), (by_name, "model")):
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert "v1, v2" in reply.json()["error"]["message"]
        assert HEADER not in reply.headers
    two = {"prompt": "a", "model": f"{MODEL}@v1"}
    assert house.post("/v1/completions", two, headers={HEADER: "v2"}).status_code == 400
    other = {"prompt": "a", "model": "other@v1"}
    assert house.post("/v1/completions", other).status_code == 404


def test_a_user_keeps_its_version_while_the_share_grows_whatever_it_asks(house: House):
    users = [f"user {i}" for i in range(8)]
    had: set[str] = set()
    for value in (0.2, 0.5, 0.8):
        share(house, value)
        has = {u for u in users if ask(house, user=u) == "v2"}
        again = {u for u in users if ask(house, user=u, max_tokens=4, seed=1) == "v2"}
        assert has == again
        assert had <= has
        had = has
    assert 0 < len(had) < 8


def test_what_the_key_of_a_call_is(house: House):
    """Each of these names has a place of its own, and what comes first in the list counts."""
    share(house, 0.5)
    named = {name: ask(house, user=name) for name in map(str, range(5))}
    assert set(named.values()) == {"v1", "v2"}
    conversation = "x-jaxinfer-conversation"
    for name, version in named.items():
        other = next(n for n, v in named.items() if v != version)
        assert ask(house, user=int(name)) == version
        assert ask(house, prompt_cache_key=name) == version
        assert ask(house, {conversation: name}) == version
        assert ask(house, {conversation: other}, prompt_cache_key=name) == version
        assert ask(house, {conversation: other}, user=name, prompt_cache_key=other) == version


def test_a_conversation_stays_on_its_version_turn_after_turn(house: House):
    share(house, 0.5)
    seen: set[str] = set()
    for name in range(8):
        messages = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": f"I am {name}"},
        ]
        versions: list[str] = []
        for turn in range(3):
            body = {"messages": messages, "max_tokens": 2, "temperature": turn / 10}
            versions.append(house.post("/v1/chat/completions", body).headers[HEADER])
            messages += [
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": f"turn {turn}"},
            ]
        assert len(set(versions)) == 1
        seen |= set(versions)
    assert seen == {"v1", "v2"}


def test_the_header_is_on_streams_and_on_errors_after_the_choice(house: House):
    pin = {HEADER: "v2", "origin": "https://a.example"}
    stream = house.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}, headers=pin
    )
    assert stream.headers[HEADER] == "v2"
    assert '"text":"c"' in stream.text
    assert HEADER in stream.headers["access-control-expose-headers"]
    long = house.post("/v1/completions", {"prompt": "a" * 500}, headers=pin)
    assert (long.status_code, long.headers[HEADER]) == (400, "v2")
    unknown = house.post("/v1/completions", {"prompt": [10**6]}, headers=pin)
    assert (unknown.status_code, unknown.headers[HEADER]) == (400, "v2")
    assert HEADER not in house.get("/v1/models").headers


def test_all_prompts_and_choices_of_a_call_are_of_one_version(house: House):
    reply = house.post(
        "/v1/completions",
        {"prompt": ["a", "a", "a"], "n": 2, "max_tokens": 4, "temperature": 0},
        headers={HEADER: "v2"},
    )
    assert [c["text"] for c in reply.json()["choices"]] == [SAYS["v2"]] * 6


def test_the_log_line_has_the_version(house: House, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "jaxinfer.access"):
        ask(house, {HEADER: "v2"})
        house.wait_until(lambda: any(hasattr(r, "fields") for r in caplog.records))
    fields = next(r.fields for r in caplog.records if hasattr(r, "fields"))  # type: ignore[attr-defined]
    assert fields["version"] == "v2"


def test_models_lists_versions_while_there_are_several(house: House):
    cards = {c["id"]: c["root"] for c in house.get("/v1/models").json()["data"]}
    assert cards == {
        MODEL: "tests/letters",
        f"{MODEL}@v1": "tests/letters",
        f"{MODEL}@v2": "tests/v2",
    }
    assert house.get(f"/v1/models/{MODEL}@v2").json()["root"] == "tests/v2"
    assert house.get(f"/v1/models/{MODEL}@v9").status_code == 400
    with open_house() as alone:
        assert [c["id"] for c in alone.get("/v1/models").json()["data"]] == [MODEL]


def test_tokenizers_are_those_of_the_version():
    with open_house() as house:
        house.add_engine("v2", marks=("<|x|>",))
        text = {"prompt": "<|x|>"}
        assert house.post("/tokenize", text).json()["count"] == 5
        pinned = house.post("/tokenize", text, headers={HEADER: "v2"})
        assert (pinned.json()["count"], pinned.headers[HEADER]) == (1, "v2")
        ids = pinned.json()["tokens"]
        back = {"tokens": ids, "model": f"{MODEL}@v2"}
        assert house.post("/detokenize", back).json()["prompt"] == "<|x|>"
        assert house.post("/detokenize", {"tokens": ids}).status_code == 400
        assert ask(house, {HEADER: "v2"}, logit_bias={str(ids[0]): -5}) == "v2"
        bias = {"prompt": "a", "logit_bias": {str(ids[0]): -5}}
        assert house.post("/v1/completions", bias).status_code == 400
        house.wait_until_idle()


def test_listeners_are_told_what_ended_and_one_that_fails_harms_nobody(house: House):
    facts: list[RequestFacts] = []
    answered: list[Answered] = []

    def hear(on_request: Any, on_answered: Any) -> None:
        house.state.on_request, house.state.on_answered = on_request, on_answered

    def broken(_: object) -> None:
        raise RuntimeError("a listener's fault")

    share(house, 1.0)
    house.on_loop(lambda: hear(facts.append, answered.append))
    ask(house, n=2, user="u")
    house.on_loop(lambda: hear(broken, broken))
    ask(house)
    house.on_loop(lambda: hear(None, None))
    assert [(f.version, f.finish, f.num_output_tokens) for f in facts] == [
        ("v2", FinishReason.LENGTH, 4)
    ] * 2
    assert all(f.ttft_s is not None and f.ttft_s > 0 for f in facts)
    assert {f.key for f in facts} == {"u"}
    (found,) = answered
    assert found.request.token_ids == tuple(house.tokenizer.encode("a"))
    assert found.request.version == found.model.version == "v2"
    assert [c.text for c in found.choices] == [SAYS["v2"]] * 2


def test_logits_that_are_not_numbers_are_told_of_their_version(house: House):
    facts: list[RequestFacts] = []
    runner = house.runners.get("v2", house.runner)
    house.on_loop(lambda: setattr(house.state, "on_request", facts.append))
    runner.not_numbers.add("v2")
    reply = house.post("/v1/completions", {"prompt": "a"}, headers={HEADER: "v2"})
    runner.not_numbers.clear()
    ask(house)
    house.on_loop(lambda: setattr(house.state, "on_request", None))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "not_numbers")
    told = [(f.version, f.finish, f.is_not_numbers) for f in facts]
    assert told == [("v2", FinishReason.ERROR, True), ("v1", FinishReason.LENGTH, False)]


def test_a_call_that_pins_its_version_judges_none(house: House):
    facts: list[RequestFacts] = []
    house.on_loop(lambda: setattr(house.state, "on_request", facts.append))
    ask(house, {HEADER: "v2"})
    ask(house, model=f"{MODEL}@v1")
    house.on_loop(lambda: setattr(house.state, "on_request", None))
    assert facts == []


def test_a_client_that_leaves_is_told_as_an_abort():
    with open_house() as house:
        house.add_version("v2", share=1.0)
        house.runner.step_s = 0.01
        facts: list[RequestFacts] = []
        house.on_loop(lambda: setattr(house.state, "on_request", facts.append))
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with house.client.stream("POST", house.url + "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
        house.wait_until(lambda: facts)
        house.wait_until_idle()
        assert (facts[0].version, facts[0].finish) == ("v2", FinishReason.ABORT)
        assert len(facts) == 1


def stream_of(house: House, number: int) -> tuple[str, str]:
    """The version and the text of a stream of 20 letters."""
    body = {"prompt": "a", "max_tokens": 20, "temperature": 0, "stream": True, "user": f"u{number}"}
    reply = house.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    lines = [li.removeprefix("data: ") for li in reply.text.splitlines() if li]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    assert {c["system_fingerprint"] for c in chunks} == {reply.headers[HEADER]}
    return reply.headers[HEADER], text


@pytest.mark.parametrize("manner", ["beside", "engine"])
def test_a_version_is_removed_under_load_without_a_gap(manner: str):
    """It comes, is promoted, and the one before it is taken away while all of that is asked."""
    with open_house() as house, ThreadPoolExecutor(8) as clients:
        house.runner.step_s = 0.001
        first = house.state.model
        assert first is not None
        calls = [clients.submit(stream_of, house, i) for i in range(10)]
        add = house.add_version if manner == "beside" else house.add_engine
        second = add("v2", share=0.5)
        calls += [clients.submit(stream_of, house, i) for i in range(10, 30)]

        async def promote() -> None:
            versions = house.state.versions
            versions.serve(second)
            versions.remove("v1")
            await versions.wait_until_unused("v1")
            if manner == "beside":
                await house.engine.change(lambda e: e.serve_version("v2"))
                await house.engine.change(lambda e: e.drop_version("v1"))
            else:
                await first.engine.close()

        house.wait_until(lambda: sum(c.done() for c in calls) > 12, 20)
        done = asyncio.run_coroutine_threadsafe(promote(), house.loop)
        calls += [clients.submit(stream_of, house, i) for i in range(30, 40)]
        done.result(20)
        answers = [call.result() for call in calls]
        house.wait_until_idle()
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        says = {"v1": alphabet[1:21], "v2": (alphabet * 2)[2:42:2]}
        assert all(text == says[version] for version, text in answers)
        assert {version for version, _ in answers} == {"v1", "v2"}
        assert {version for version, _ in answers[-4:]} == {"v2"}
        if manner == "beside":
            assert house.runner.dropped == ["v1"]


def test_a_canary_engine_that_dies_fails_its_own_calls_and_nobody_elses(
    caplog: pytest.LogCaptureFixture,
):
    with open_house() as house, ThreadPoolExecutor(2) as clients:
        canary = house.add_engine("v2", share=1.0)
        facts: list[RequestFacts] = []
        house.on_loop(lambda: setattr(house.state, "on_request", facts.append))
        house.runners["v2"].gate.clear()
        call = clients.submit(house.complete, "a", max_tokens=4)
        house.wait_until(lambda: canary.engine.num_open)
        house.runners["v2"].failing["v2"] = SystemExit("the device is gone")
        house.runners["v2"].gate.set()
        lost = call.result()
        assert (lost.status_code, lost.headers[HEADER]) == (500, "v2")
        assert [(f.version, f.finish) for f in facts] == [("v2", FinishReason.ERROR)]
        assert not canary.engine.is_alive
        assert house.get("/health").status_code == house.get("/ready").status_code == 200
        assert ask(house) == "v1"
        pinned = house.post("/v1/completions", {"prompt": "a"}, headers={HEADER: "v2"})
        assert pinned.status_code == 503
        flushing = asyncio.run_coroutine_threadsafe(house.state.flush_caches(), house.loop)
        assert flushing.result(5) == house.engine.pool_stats.pages_cached == 0
        house.wait_until(lambda: house.state.admission.num_open == 0)


@pytest.mark.parametrize("manner", ["beside", "engine"])
def test_failing_steps_of_a_canary_open_no_breaker_and_are_answered_by_nobody_else(manner: str):
    with open_house(max_retries=0) as house:
        if manner == "beside":
            house.add_version("v2", share=1.0)
        else:
            house.add_engine("v2", share=1.0, max_retries=0)
        runner = house.runners.get("v2", house.runner)
        runner.failing["v2"] = RuntimeError("no")
        for _ in range(house.state.limits.breaker_threshold + 1):
            reply = house.complete("a", max_tokens=4)
            assert (reply.status_code, reply.headers[HEADER]) == (500, "v2")
        assert house.get("/ready").status_code == 200
        assert ask(house, {HEADER: "v1"}) == "v1"
        assert house.metric("circuit_breaker_state") == 0
        house.wait_until_idle()


def test_a_drain_waits_for_the_calls_of_every_engine():
    with open_house() as house, ThreadPoolExecutor(2) as clients:
        house.add_engine("v2")
        house.runners["v2"].step_s = house.runner.step_s = 0.005
        fields = {"prompt": "a", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        calls = [
            clients.submit(house.post, "/v1/completions", fields, headers={HEADER: version})
            for version in ("v1", "v2")
        ]
        house.wait_until(lambda: house.state.num_open == 2)

        async def drain() -> bool:
            house.state.begin_drain(10.0)
            return await house.state.drain_engines(10.0)

        assert asyncio.run_coroutine_threadsafe(drain(), house.loop).result(10)
        replies = [call.result() for call in calls]
        assert [reply.headers[HEADER] for reply in replies] == ["v1", "v2"]
        assert {reply.json()["usage"]["completion_tokens"] for reply in replies} == {30}
        assert house.complete("a").status_code == 503


def test_a_long_body_is_parsed_off_the_loop_and_answered_by_its_version(house: House):
    padding = {"metadata": {"note": "x" * 100_000}}
    assert ask(house, {HEADER: "v2"}, **padding) == "v2"


def test_a_call_that_has_chosen_and_not_begun_is_waited_for():
    with open_house() as house, ThreadPoolExecutor(2) as clients:
        second = house.add_version("v2")
        go_on = threading.Event()
        for _ in range(2):  # so that no thread is left to encode its prompt
            second.pool.submit(go_on.wait)
        call = clients.submit(ask, house, {HEADER: "v1"})
        house.wait_until(lambda: house.state.versions.num_calls("v1"))

        async def take_away() -> None:
            house.state.versions.serve(second)
            house.state.versions.remove("v1")
            await house.engine.change(lambda e: e.serve_version("v2"))
            await house.state.versions.wait_until_unused("v1")
            await house.engine.change(lambda e: e.drop_version("v1"))

        done = asyncio.run_coroutine_threadsafe(take_away(), house.loop)
        house.wait_until(lambda: house.core.version == "v2")
        assert not call.done()
        assert not done.done()
        go_on.set()
        assert call.result() == "v1"
        done.result(5)
        house.wait_until(lambda: house.runner.dropped == ["v1"])
        assert ask(house) == "v2"


def test_what_a_canary_refuses_the_stable_version_answers_as_without_a_canary():
    with open_house() as house:
        canary = house.add_engine("v2", share=1.0, max_model_len=64, marks=())
        told: list[RequestFacts] = []
        house.state.on_request = told.append
        assert ask(house) == "v2"
        long = {"prompt": "z" * 100 + "a", "max_tokens": 4, "temperature": 0}
        for stream in (False, True):
            reply = house.post("/v1/completions", {**long, "stream": stream})
            assert (reply.status_code, reply.headers[HEADER]) == (200, "v1"), reply.text
        house.wait_until(lambda: len(told) == 3)
        ends = [(facts.version, facts.finish) for facts in told]
        assert ends == [("v2", FinishReason.LENGTH)] + [("v2", FinishReason.ERROR)] * 2
        pinned = house.post("/v1/completions", long, headers={HEADER: "v2"})
        assert (pinned.status_code, pinned.headers[HEADER]) == (400, "v2")
        bad = house.post("/v1/completions", {**long, "prompt": "z" * 300})
        assert (bad.status_code, bad.headers[HEADER]) == (400, "v1")
        assert "256" in bad.json()["error"]["message"]
        house.wait_until_idle()
        assert len(told) == 3  # what nobody answers judges nobody
        assert house.state.admission.num_open == 0
        assert house.on_loop(lambda: house.state.versions.num_calls(canary.version)) == 0
