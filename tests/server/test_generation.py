"""Answers of the two generation routes, whole and streamed, against texts worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jaxinfer.server.state import Limits
from tests.server.house import EOS, MAX_MODEL_LEN, MODEL, House, open_house


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        c.get("text") or c.get("delta", {}).get("content") or ""
        for chunk in chunks
        for c in chunk["choices"]
        if c["index"] == index
    )


def test_a_completion_has_openais_shape(house: House):
    reply = house.complete("a", max_tokens=5)
    assert reply.status_code == 200
    body = reply.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "bcdef", "finish_reason": "length", "logprobs": None}],
        "system_fingerprint": "v1",
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 5,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_chat_answer_has_openais_shape(house: House):
    body = house.chat("3").json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "210", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "system_fingerprint": "v1",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_chat_stream_says_role_content_finish_usage_done(house: House):
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(house.chat("2", **stream))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(c["delta"]) == {"content"} for c in choices[1:-1])
    assert "".join(c["delta"]["content"] for c in choices[1:-1]) == "10"
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_without_include_usage_no_chunk_speaks_of_usage(house: House):
    assert all("usage" not in chunk for chunk in events(house.chat("2", stream=True)))


def test_continuous_usage_counts_up_to_the_total(house: House):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(house.complete("a", max_tokens=6, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": ["e"]}, {"logprobs": 2}])
def test_a_stream_says_the_same_as_the_whole_answer(house: House, fields: dict[str, Any]):
    whole = house.complete(["a", "5"], max_tokens=8, **fields).json()
    options = {"include_usage": True}
    chunks = events(
        house.complete(["a", "5"], max_tokens=8, stream=True, stream_options=options, **fields)
    )
    for choice in whole["choices"]:
        index = choice["index"]
        assert text_of(chunks, index) == choice["text"]
        reasons = [
            c["finish_reason"]
            for chunk in chunks
            for c in chunk["choices"]
            if c["index"] == index and c["finish_reason"]
        ]
        assert reasons == [choice["finish_reason"]]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_every_choice_finishes_exactly_once_before_usage_and_done(house: House):
    options = {"include_usage": True}
    for prompt, reason in (("a", "length"), ("4", "stop")):
        chunks = events(
            house.complete(prompt, n=4, max_tokens=7, stream=True, stream_options=options)
        )
        reasons = [(c["index"], c["finish_reason"]) for k in chunks for c in k["choices"]]
        assert sorted(r for r in reasons if r[1]) == [(i, reason) for i in range(4)]
        assert chunks[-1]["choices"] == []
        assert all(chunk["choices"] for chunk in chunks[:-1])


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(house: House):
    choices = house.complete(["a", "x", "3"], n=2, max_tokens=3).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3, 4, 5]
    assert [c["text"] for c in choices] == ["bcd", "bcd", "yza", "yza", "210", "210"]


def test_a_prompt_may_come_as_token_ids(house: House):
    ids = house.post("/tokenize", {"prompt": "ab"}).json()["tokens"]
    assert house.complete(ids, max_tokens=2).json()["choices"][0]["text"] == "cd"
    texts = [c["text"] for c in house.complete([ids, ids[:1]], max_tokens=2).json()["choices"]]
    assert texts == ["cd", "bc"]


def test_a_stop_string_is_left_out_and_ends_the_text(house: House):
    choice = house.complete("a", stop="ef", max_tokens=20).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("bcd", "stop")
    shown = house.complete("a", stop=["ef"], include_stop_str_in_output=True, max_tokens=20)
    assert shown.json()["choices"][0]["text"] == "bcdef"


def test_no_part_of_a_stop_string_is_streamed(house: House):
    chunks = events(house.complete("a", stop=["efgh"], max_tokens=20, stream=True))
    assert text_of(chunks) == "bcd"


def test_ignore_eos_and_skip_special_tokens_are_passed_on(house: House):
    fields = {"ignore_eos": True, "max_tokens": 4, "skip_special_tokens": False}
    assert house.complete("2", **fields).json()["choices"][0]["text"] == f"10{EOS}a"


def test_completions_default_to_sixteen_tokens_and_chat_to_the_rest_of_the_context(house: House):
    assert house.complete("a").json()["usage"]["completion_tokens"] == 16
    assert house.chat("a").json()["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_max_completion_tokens_wins_over_max_tokens(house: House):
    usage = house.chat("a", max_tokens=9, max_completion_tokens=2).json()["usage"]
    assert usage["completion_tokens"] == 2


def test_logprobs_of_a_completion(house: House):
    choice = house.complete("3", logprobs=2).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["2", "1", "0", EOS]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"][0] == {"2": -0.5, "3": -1.5}


def test_logprobs_of_a_chat_answer(house: House):
    choice = house.chat("1", logprobs=True, top_logprobs=2).json()["choices"][0]
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "0"
    assert first["bytes"] == [48]
    assert [(t["token"], t["logprob"]) for t in first["top_logprobs"]] == [("0", -0.5), ("1", -1.5)]
    without = house.chat("1", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [t["top_logprobs"] for t in without] == [[], []]


def test_streamed_logprobs_are_one_per_token_and_run_on(house: House):
    chunks = events(house.complete("a", max_tokens=9, logprobs=0, stop=["zz"], stream=True))
    found = [c["logprobs"] for k in chunks for c in k["choices"] if c["logprobs"]]
    assert [o for p in found for o in p["text_offset"]] == list(range(9))
    assert "".join(t for p in found for t in p["tokens"]) == "bcdefghij"


def test_cached_tokens_of_a_repeated_prompt_are_told(house: House):
    prompt = "the very same prompt of forty characters!!"
    assert house.complete(prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    details = house.complete(prompt).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 40
    salted = house.complete(prompt, cache_salt="mine").json()["usage"]["prompt_tokens_details"]
    assert salted["cached_tokens"] == 0


def test_content_may_come_as_text_parts(house: House):
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert house.chat(parts, max_tokens=1).json()["choices"][0]["message"]["content"] == "z"


def test_the_last_message_can_be_continued(house: House):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "r"}]
    body = {"messages": messages, "max_tokens": 2, "continue_final_message": True}
    reply = house.post("/v1/chat/completions", body)
    assert reply.json()["choices"][0]["message"]["content"] == "st"


def test_the_models_own_defaults_stand_in_for_absent_fields():
    with open_house(defaults={"temperature": 0.25, "top_k": 7}) as house:
        seen: list[Any] = []
        submit = house.engine.submit

        def spy(*requests: Any) -> Any:
            seen.extend(requests)
            return submit(*requests)

        house.engine.submit = spy  # type: ignore[method-assign]
        house.complete("a")
        house.complete("a", temperature=1.5, top_k=0)
        sampling = [(r.sampling.temperature, r.sampling.top_k) for r in seen]
        assert sampling == [(0.25, 7), (1.5, 0)]


def test_a_silent_stream_is_pinged():
    with open_house(limits=Limits(ping_s=0.05)) as house:
        house.runner.step_s = 0.3
        text = house.complete("3", max_tokens=2, stream=True).text
        assert text.count(": ping\n\n") >= 4
        assert "data: [DONE]" in text


def test_a_request_over_its_time_limit_is_a_504():
    with open_house(limits=Limits(request_timeout_s=0.1)) as house:
        house.runner.step_s = 0.02
        reply = house.complete("a", max_tokens=200)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
        house.wait_until_idle()


def test_a_time_limit_inside_a_stream_is_an_error_event_then_done():
    with open_house(limits=Limits(request_timeout_s=0.1)) as house:
        house.runner.step_s = 0.02
        chunks = events(house.complete("a", max_tokens=200, stream=True))
        assert chunks[0]["choices"][0]["text"] == "b"
        assert chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert chunks[-1]["error"]["type"] == "timeout_error"


def test_a_failing_step_is_a_500_and_the_server_goes_on():
    with open_house(limits=Limits(breaker_threshold=100)) as house:
        house.runner.fail_with = RuntimeError("bad step")
        for stream in (False, True):
            reply = house.complete("a", stream=stream)
            assert reply.status_code == 500
            assert reply.json()["error"]["code"] == "engine_failure"
            assert reply.headers["x-should-retry"] == "false"
        house.runner.fail_with = None
        assert house.complete("a").status_code == 200


def test_a_step_that_fails_inside_a_stream_is_an_error_event_then_done():
    with open_house() as house:
        house.runner.step_s = 0.02
        url = f"{house.url}/v1/completions"
        body = {"prompt": "a", "max_tokens": 200, "stream": True}
        with house.client.stream("POST", url, json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            house.runner.fail_with = RuntimeError("bad step")
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_failure"


def test_a_dead_engine_makes_health_503_and_requests_unavailable():
    class Gone(BaseException):
        pass

    with open_house() as house:
        house.runner.fail_with = Gone()
        assert house.complete("a").status_code == 500
        house.wait_until(lambda: not house.engine.is_alive)
        assert house.get("/health").status_code == 503
        assert house.get("/ready").status_code == 503
        assert house.complete("a").status_code == 503


def test_a_hanging_step_makes_health_503():
    with open_house(limits=Limits(step_timeout_s=0.2)) as house:
        assert house.get("/health").status_code == 200
        house.runner.gate.clear()
        body = {"prompt": "a"}
        with pytest.raises(httpx.TimeoutException):
            house.client.post(f"{house.url}/v1/completions", json=body, timeout=0.4)
        assert house.get("/health").status_code == 503
        house.runner.gate.set()
        house.wait_until_idle()
