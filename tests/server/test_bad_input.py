"""Bad input is a 4xx in OpenAI's error shape that names the field; the next request is served."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxinfer.server.state import Limits
from tests.server.house import MAX_MODEL_LEN, MODEL, House, open_house


@pytest.fixture(autouse=True)
def still_serving(house: House) -> Iterator[None]:
    yield
    assert house.complete("a", max_tokens=1).json()["choices"][0]["text"] == "b"


def check(reply: Any, status: int = 400, param: str | None = None, code: str | None = None) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["code"] == code, error
    assert reply.headers["x-request-id"]
    return error["message"]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[64], []]])
def test_an_empty_prompt_is_refused(house: House, prompt: Any):
    check(house.complete(prompt), param="prompt")


@pytest.mark.parametrize("prompt", [["a", 1], [1, "a"], [[64], 64], [[64], "a"], [64, [64]]])
def test_a_list_that_mixes_kinds_is_refused(house: House, prompt: Any):
    check(house.complete(prompt), param="prompt")


@pytest.mark.parametrize("prompt", [[-1], [257], [[64], [10**9]], [10**30]])
def test_token_ids_outside_the_vocabulary_are_refused(house: House, prompt: Any):
    assert "token ids" in check(house.complete(prompt), param="prompt")


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [None], [1.5], [[[64]]], True])
def test_a_prompt_of_another_type_is_refused(house: House, prompt: Any):
    check(house.complete(prompt), param="prompt")


@pytest.mark.parametrize("messages", [None, "hi", [1], ["hi"], {}])
def test_messages_of_another_type_are_refused(house: House, messages: Any):
    check(house.post("/v1/chat/completions", {"messages": messages}), param="messages")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        [{"role": "user"}],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "tool", "content": "the template refuses this"}],
    ],
)
def test_malformed_messages_are_refused(house: House, messages: Any):
    reply = house.post("/v1/chat/completions", {"messages": messages})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_the_templates_own_words_reach_the_client(house: House):
    body = {"messages": [{"role": "tool", "content": "x"}]}
    reply = house.post("/v1/chat/completions", body)
    assert "tools are not for this model" in reply.json()["error"]["message"]


@pytest.mark.parametrize("missing", ["/v1/chat/completions", "/v1/completions", "/detokenize"])
def test_a_missing_field_is_named(house: House, missing: str):
    field = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}.get(missing, "tokens")
    check(house.post(missing, {"model": MODEL}), param=field)


@pytest.mark.parametrize("max_tokens", [0, -1, "5", 1.5, True, [], 2**70])
def test_max_tokens_out_of_its_range_is_refused(house: House, max_tokens: Any):
    for call in (house.complete, house.chat):
        reply = call("a", max_tokens=max_tokens)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "max_tokens"


def test_max_tokens_null_is_the_default_and_a_huge_one_is_too_long(house: House):
    assert house.complete("a", max_tokens=None).status_code == 200
    code = "context_length_exceeded"
    check(house.complete("a", max_tokens=10**9), param="max_tokens", code=code)


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_a_prompt_that_leaves_no_room_is_too_long(house: House, excess: int):
    prompt = "a" * (MAX_MODEL_LEN + excess)
    code = "context_length_exceeded"
    for stream in (False, True):
        check(house.complete(prompt, max_tokens=1, stream=stream), param="prompt", code=code)
        check(house.chat(prompt, stream=stream), param="messages", code=code)


def test_a_prompt_one_short_of_the_context_gets_one_token(house: House):
    reply = house.complete("a" * (MAX_MODEL_LEN - 1), max_tokens=1)
    choice = reply.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("b", "length")
    code = "context_length_exceeded"
    long = house.complete("a" * (MAX_MODEL_LEN - 1), max_tokens=2)
    check(long, param="max_tokens", code=code)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, "1", True, [1]]),
        ("top_p", [0, -1, 1.1, "x"]),
        ("top_k", [-2, 1.5, "5"]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 3, "1", True, [1], 10**400]),
        ("frequency_penalty", [-2.1, 3, "1", False]),
        ("repetition_penalty", [0, -1, "1", True]),
        ("logit_bias", [{"999999": 5}, {"-1": 5}, {"abc": 1}, {"257": 1}, {"1.5": 1}, {"": 1}]),
        ("logit_bias", [{"5": 101}, {"5": "1"}, {"5": True}, {"5": None}, [5], "5", 5]),
        ("logit_bias", [{"5": 1, "05": 1}, {str(i): 1 for i in range(301)}]),
        ("min_tokens", [-1, 17, 1.5]),
        ("n", [0, -1, 17, 1.5, "2"]),
        ("seed", [1.5, "x", 2**63, -(2**63) - 1]),
        ("stop", ["", [""], ["a", ""], [1], 5, ["x"] * 33]),
        ("stop_token_ids", [[-1], [10**9], [257], ["a"], 5]),
        ("logprobs", [-1, 21, True, "1"]),
        ("ignore_eos", [1, "yes"]),
        ("stream", ["true", 1]),
        ("stream_options", [{"include_usage": True}, 1]),
        ("priority", [1.5, "high", 10**400, -101]),
        ("cache_salt", [1]),
        ("model", [1, ["letters"]]),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(
    house: House, field: str, values: list[Any]
):
    for value in values:
        reply = house.complete("a", **{field: value})
        assert reply.status_code == 400, (value, reply.text)
        assert reply.json()["error"]["param"] == field, (value, reply.text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"strftime_now": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_chats_own_fields_are_checked(house: House, fields: dict[str, Any], param: str):
    check(house.chat("a", **fields), param=param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length_penalty", 0.5),
        ("best_of", 2),
        ("suffix", "x"),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("guided_decoding_backend", "outlines"),
        ("structural_tag", {"format": {}}),
        ("prompt_logprobs", 1),
        ("use_beam_search", True),
    ],
)
def test_a_field_without_its_feature_is_refused_by_name(house: House, field: str, value: Any):
    for call in (house.complete, house.chat):
        reply = call("a", **{field: value})
        assert "not supported" in check(reply, param=field)


def test_a_field_of_the_other_route_is_refused_by_name(house: House):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "not supported" in check(house.complete("a", tools=tools), param="tools")
    assert "not supported" in check(house.complete("a", tool_choice="auto"), param="tool_choice")
    assert "not supported" in check(house.chat("a", echo=True), param="echo")


def test_neutral_values_of_absent_features_are_accepted(house: House):
    neutral = {
        "length_penalty": 1.0,
        "echo": False,
        "best_of": 1,
        "suffix": None,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "guided_json": None,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
    }
    for call in (house.complete, house.chat):
        assert call("a", max_tokens=1, **neutral).status_code == 200


NO_PENALTIES = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}


@pytest.mark.parametrize("values", [NO_PENALTIES, dict.fromkeys(NO_PENALTIES)])
def test_neutral_and_null_penalties_are_no_penalties(house: House, values: dict[str, Any]):
    for call in (house.complete, house.chat):
        assert call("a", max_tokens=1, **values).status_code == 200


@pytest.mark.parametrize("bias", [{"999999": 5}, {"-1": 5}, {"abc": 1}])
def test_a_wrong_logit_bias_does_not_touch_a_request_that_runs(house: House, bias: dict[str, int]):
    """FAILURES F17."""
    fields = {"max_tokens": 30, "temperature": 0, "logprobs": 1}
    alone = house.complete("a", **fields).json()["choices"]
    before, house.runner.step_s = house.runner.num_steps, 0.01
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(house.complete, "a", **fields)
        house.wait_until(lambda: house.runner.num_steps > before + 2)
        check(house.complete("a", logit_bias=bias), param="logit_bias")
        assert running.result().json()["choices"] == alone
    house.runner.step_s = 0.0


def test_unknown_fields_are_accepted_and_logged_once(house: House, caplog):
    for _ in range(3):
        assert house.complete("a", max_tokens=1, never_heard_of="x").status_code == 200
    named = [r for r in caplog.records if "never_heard_of" in r.getMessage()]
    assert len(named) == 1


def test_an_unknown_model_is_a_404(house: House):
    body = {"model": "other", "prompt": "a"}
    code = "model_not_found"
    check(house.post("/v1/completions", body), 404, "model", code)
    chat = {"model": "other", "messages": [{"role": "user", "content": "a"}]}
    check(house.post("/v1/chat/completions", chat), 404, "model", code)
    check(house.get("/v1/models/other"), 404, "model", code)
    assert house.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": 1e2}x',
    ],
)
def test_a_malformed_body_is_a_400(house: House, body: bytes):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = house.client.post(house.url + path, content=body, timeout=20)
        assert reply.status_code == 400, (path, reply.text)
        assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": -Infinity}', "not valid JSON"),
        (b'{"prompt": "a\x00"}', "not valid JSON"),
        (b'{"prompt": "\\udc00"}', "not valid JSON"),
        (b'{"prompt": "a", "user": ' + b"9" * 100_000 + b"}", "Integer value out of range"),
        (b'{"prompt": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 100 levels"),
        (b'{"prompt": "a", "x": ' + b'{"y":' * 100 + b"1" + b"}" * 101, "more than 100 levels"),
        (b'{"prompt": [' + b"[]," * 300_000 + b"[]]}", "600003 commas and opening"),
    ],
)
def test_json_beyond_its_limits_is_a_400_that_names_the_limit(
    house: House, body: bytes, words: str
):
    reply = house.client.post(f"{house.url}/v1/completions", content=body, timeout=20)
    assert words in check(reply)


def test_json_at_its_limits_is_read(house: House):
    deep = b'{"prompt": "a", "max_tokens": 1, "x": ' + b"[" * 99 + b"]" * 99 + b"}"
    wide = b'{"prompt": "a", "max_tokens": 1, "x": "' + b"," * 400_000 + b'"}'
    for body in (deep, wide):
        reply = house.client.post(f"{house.url}/v1/completions", content=body, timeout=20)
        assert reply.status_code == 200, reply.text


def test_of_a_name_that_comes_twice_the_last_value_counts(house: House):
    body = b'{"prompt": "a", "max_tokens": 5, "max_tokens": 1}'
    reply = house.client.post(f"{house.url}/v1/completions", content=body)
    assert reply.json()["usage"]["completion_tokens"] == 1


def test_nul_is_a_character_like_others_in_a_prompt_but_in_no_name(house: House):
    assert house.complete("a\x00", max_tokens=1).json()["usage"]["prompt_tokens"] == 2
    check(house.complete("a", model="letters\x00"), 404, "model", "model_not_found")


def test_a_chat_holds_a_bounded_number_of_messages(house: House):
    body = {"messages": [{"role": "user", "content": ""}] * 10_001}
    for path in ("/v1/chat/completions", "/tokenize"):
        assert "length <= 10000" in check(house.post(path, body), param="messages")


def test_a_prompt_that_the_pool_cannot_hold_is_refused_by_the_name_of_the_clients_field():
    code = "context_length_exceeded"
    with open_house(num_pages=4) as house:  # 32 tokens
        check(house.complete("a" * 50), param="prompt", code=code)
        check(house.chat("a" * 50), param="messages", code=code)
        assert house.chat("a", max_completion_tokens=9).status_code == 200


def test_an_answer_that_fills_the_pool_ends_with_length():
    with open_house(num_pages=4) as house:  # 32 tokens, and one that needs no page
        reply = house.chat("a", max_tokens=99)
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        assert reply.json()["usage"]["total_tokens"] == 33


def test_a_body_over_the_bound_is_a_413():
    with open_house(limits=Limits(max_body_bytes=1000)) as house:
        body = json.dumps({"prompt": "a" * 2000}).encode()
        code = "body_too_large"
        url = f"{house.url}/v1/completions"
        check(house.client.post(url, content=body), 413, code=code)
        chunks = (body[i : i + 100] for i in range(0, len(body), 100))
        check(house.client.post(url, content=chunks), 413, code=code)
        assert house.complete("a").status_code == 200


def test_a_body_that_does_not_arrive_is_a_408():
    with open_house(limits=Limits(body_s=0.1)) as house:
        host, port = house.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer
        assert 'rejected_total{model_name="letters",reason="too_slow"} 1.0' in (
            house.get("/metrics").text
        )
        assert house.complete("a").status_code == 200


def test_a_large_body_is_parsed_too_and_its_faults_are_found(house: House):
    filler = {"user": "x" * 200_000}
    assert house.complete("a", max_tokens=1, **filler).status_code == 200
    check(house.complete("a", max_tokens=0, **filler), param="max_tokens")
    check(house.complete([65] * 100_000), param="prompt", code="context_length_exceeded")
    check(house.complete([65] * 100_000 + [-1]), param="prompt")
    check(house.complete(["a"] * 100_000), param="prompt")


def test_unknown_routes_are_404_in_the_same_shape(house: House):
    for path in ("/", "/v1", "/v1/nope", "/v2/completions", "/v1/completions/x"):
        assert "unknown route" in check(house.get(path), 404)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/messages"])
def test_features_of_others_are_a_404_that_says_so(house: House, path: str):
    assert "does not offer" in check(house.post(path, {}), 404, code="not_supported")


def test_a_wrong_method_is_a_405_in_the_same_shape(house: House):
    reply = house.get("/v1/completions")
    check(reply, 405)
    assert "POST" in reply.headers["allow"]
    check(house.post("/v1/models", {}), 405)
    check(house.client.delete(f"{house.url}/health"), 405)


def test_tokenize_takes_either_prompt_or_messages(house: House):
    check(house.post("/tokenize", {}), param="prompt")
    both = {"prompt": "a", "messages": []}
    check(house.post("/tokenize", both), param="prompt")
    check(house.post("/tokenize", {"prompt": 5}), param="prompt")
    check(house.post("/detokenize", {"tokens": [5, -1]}), param="tokens")
    check(house.post("/detokenize", {"tokens": ["a"]}), param="tokens")
