"""The OpenAI surface field by field, where test_generation.py and test_bad_input.py say nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.house import EOS, MODEL, House, open_house
from tests.server.test_generation import events, text_of


def texts(reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def test_an_echo_is_the_prompt_before_the_text(house: House):
    assert texts(house.complete("xy", echo=True, max_tokens=2)) == ["xyza"]
    assert texts(house.complete("xy", echo=False, max_tokens=2)) == ["za"]
    assert texts(house.complete("xy", echo=None, max_tokens=2)) == ["za"]


def test_every_choice_of_every_prompt_has_its_own_echo(house: House):
    reply = house.complete(["a", "2"], n=2, echo=True, max_tokens=3)
    assert texts(reply) == ["abcd", "abcd", "210", "210"]
    assert reply.json()["usage"]["completion_tokens"] == 12


def test_token_ids_are_echoed_as_their_text(house: House):
    ids = house.post("/tokenize", {"prompt": f"ä{EOS}b"}).json()["tokens"]
    assert texts(house.complete(ids, echo=True, max_tokens=1)) == ["äbc"]
    fields = {"echo": True, "max_tokens": 1, "skip_special_tokens": False}
    assert texts(house.complete([ids, ids[-1:]], **fields)) == [f"ä{EOS}bc", "bc"]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_begins_with_the_echo(house: House, max_tokens: int):
    fields = {"n": 2, "echo": True, "max_tokens": max_tokens}
    whole = house.complete(["a", "x"], **fields).json()
    chunks = events(
        house.complete(["a", "x"], stream=True, stream_options={"include_usage": True}, **fields)
    )
    first = [chunk["choices"][0] for chunk in chunks[:4]]
    assert [(c["index"], c["text"]) for c in first] == [(0, "a"), (1, "a"), (2, "x"), (3, "x")]
    for choice in whole["choices"]:
        assert text_of(chunks, choice["index"]) == choice["text"]
        ends = [
            c["finish_reason"]
            for chunk in chunks
            for c in chunk["choices"]
            if c["index"] == choice["index"] and c["finish_reason"]
        ]
        assert ends == [choice["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_an_echo_of_nothing_more_runs_no_step(house: House):
    before = house.runner.num_steps
    reply = house.complete(["ab", "c"], echo=True, max_tokens=0)
    assert texts(reply) == ["ab", "c"]
    assert reply.json()["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert house.runner.num_steps == before


def test_what_an_echo_cannot_be(house: House):
    for fields, param in (
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": True, "logprobs": 2, "max_tokens": 0}, "echo"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"echo": "yes"}, "echo"),
    ):
        reply = house.complete("a", **fields)
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"] == param, reply.text
    too_long = house.complete("a" * 256, echo=True, max_tokens=0).json()["error"]
    assert too_long["code"] == "context_length_exceeded"


def test_continuous_usage_is_in_every_chunk_of_a_chat_too(house: House):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(house.chat("3", stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0  # with the role
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {4}


def test_stream_options_may_be_null_and_usage_may_be_off(house: House):
    for options in (None, {}, {"include_usage": False}):
        chunks = events(house.complete("3", stream=True, stream_options=options))
        assert all("usage" not in chunk for chunk in chunks)
    assert house.complete("3", stream_options=None).status_code == 200


def test_chat_logprobs_stream_one_per_token(house: House):
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6, "n": 2}
    whole = house.chat("a", **fields).json()["choices"]
    chunks = events(house.chat("a", stream=True, **fields))
    for choice in whole:
        found = [
            token
            for chunk in chunks
            for c in chunk["choices"]
            if c["index"] == choice["index"] and c["logprobs"]
            for token in c["logprobs"]["content"]
        ]
        assert found == choice["logprobs"]["content"]
        assert "".join(token["token"] for token in found) == "bcdefg"


def test_min_tokens_hold_the_end_back(house: House):
    assert texts(house.complete("2", max_tokens=9)) == ["10"]
    assert texts(house.complete("2", max_tokens=6, min_tokens=5)) == ["10abc"]


def test_stop_token_ids_end_the_text_and_are_counted(house: House):
    (d,) = house.post("/tokenize", {"prompt": "d"}).json()["tokens"]
    reply = house.complete("a", stop_token_ids=[d], max_tokens=9)
    assert texts(reply) == ["bc"]
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert reply.json()["usage"]["completion_tokens"] == 3
    shown = house.complete("a", stop_token_ids=[d], include_stop_str_in_output=True, max_tokens=9)
    assert texts(shown) == ["bcd"]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, "bcdefgh"), ([], "bcdefgh"), ("f", "bcde"), (["f"], "bcde"), (["q", "ef", "f"], "bcd")],
)
def test_stop_may_be_nothing_a_string_or_several(house: House, stop: Any, expected: str):
    assert texts(house.complete("a", stop=stop, max_tokens=7)) == [expected]


def test_prompts_may_be_lists_of_ids(house: House):
    assert texts(house.complete([[97 - 33]], max_tokens=1)) == ["b"]
    assert len(texts(house.complete([[64], [64, 65], [66]], n=2, max_tokens=1))) == 6


def test_of_best_of_and_suffix_only_the_neutral_values_are_taken(house: House):
    for fields in ({"best_of": 1}, {"best_of": None}, {"suffix": ""}, {"suffix": None}):
        assert texts(house.complete("a", max_tokens=1, **fields)) == ["b"]
    for name, value in (("best_of", 3), ("suffix", "z"), ("prompt_logprobs", 0)):
        assert house.complete("a", **{name: value}).json()["error"]["param"] == name


def said(house: House, *messages: dict[str, Any], **fields: Any) -> Any:
    return house.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


def test_messages_may_have_a_name_and_a_developer_speaks_as_system():
    source = "{% for m in messages %}[{{ m.role }} {{ m.name }}]{{ m.content }}{% endfor %}"
    with open_house(template=source) as house:
        messages = [
            {"role": "developer", "content": "x"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "y"}]},
        ]
        ids = house.post("/tokenize", {"messages": messages}).json()["tokens"]
        text = house.post("/detokenize", {"tokens": ids}).json()["prompt"]
        assert text == "[system ]x[user ann]y"
        assert said(house, *messages, max_tokens=1).status_code == 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", None])
def test_other_parts_than_text_are_refused_by_their_type(house: House, kind: str | None):
    parts = [{"type": "text", "text": "a"}, {"type": kind, str(kind): {}}]
    error = house.chat(parts).json()["error"]
    assert error["param"] == "messages"
    assert f"messages[0].content[1] has type {kind!r}" in error["message"]


def test_the_fingerprint_is_the_version_of_the_weights(house: House):
    for reply in (house.chat("1"), house.complete("1", echo=True, max_tokens=0)):
        assert reply.json()["system_fingerprint"] == "v1"
    for chunk in events(house.chat("1", stream=True)):
        assert chunk["system_fingerprint"] == "v1"
