"""The small routes, request ids and keys."""

from __future__ import annotations

import re

import pytest

from jaxinfer import __version__
from tests.server.house import EOS, MAX_MODEL_LEN, MODEL, House, open_house


def test_the_model_card(house: House):
    body = house.get("/v1/models").json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": MODEL,
        "object": "model",
        "owned_by": "jaxinfer",
        "root": "tests/letters",
        "max_model_len": MAX_MODEL_LEN,
        "parent": None,
    }
    assert house.get(f"/v1/models/{MODEL}").json()["id"] == MODEL


def test_a_model_may_be_served_under_several_names_even_with_slashes():
    with open_house(names=("org/first", "second")) as house:
        assert [m["id"] for m in house.get("/v1/models").json()["data"]] == ["org/first", "second"]
        assert house.get("/v1/models/org/first").json()["id"] == "org/first"
        body = {"prompt": "a", "max_tokens": 1}
        for asked, shown in (("second", "second"), ("org/first", "org/first")):
            reply = house.post("/v1/completions", {**body, "model": asked})
            assert reply.json()["model"] == shown
        assert house.post("/v1/completions", body).json()["model"] == "org/first"
        assert house.post("/v1/completions", {**body, "model": MODEL}).status_code == 404


def test_tokenize_and_detokenize_are_inverse(house: House):
    reply = house.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert reply["count"] == 2
    assert reply["max_model_len"] == MAX_MODEL_LEN
    assert reply["token_strs"] == ["a", "b"]
    assert house.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "ab"}


def test_tokenize_leaves_out_strings_that_nobody_asked_for(house: House):
    assert set(house.post("/tokenize", {"prompt": "a"}).json()) == {
        "count",
        "max_model_len",
        "tokens",
    }


def test_tokenize_renders_messages_as_chat_does(house: House):
    messages = [{"role": "user", "content": "hi"}]
    ids = house.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert house.post("/detokenize", {"tokens": ids}).json()["prompt"] == "<u>hi"
    usage = house.chat("hi", max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    bare = {"messages": messages, "add_generation_prompt": False}
    ids = house.post("/tokenize", bare).json()["tokens"]
    assert house.post("/detokenize", {"tokens": ids}).json()["prompt"] == "<u>hi."


def test_detokenize_shows_special_tokens(house: House):
    ids = house.post("/tokenize", {"prompt": EOS}).json()["tokens"]
    assert len(ids) == 1
    assert house.post("/detokenize", {"tokens": ids}).json()["prompt"] == EOS


def test_version_health_ready(house: House):
    assert house.get("/version").json() == {"version": __version__}
    assert house.get("/health").json() == {"status": "ready"}
    assert house.get("/ready").json() == {"status": "ready"}
    assert house.client.head(f"{house.url}/health").status_code == 200


def test_metrics_say_their_content_type(house: House):
    assert house.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_clients_request_id_comes_back_and_an_odd_one_is_replaced(house: House):
    for given in ("abc-123", "x" * 128):
        reply = house.get("/health", headers={"x-request-id": given})
        assert reply.headers["x-request-id"] == given
    for odd in ("", "x" * 129, "a b"):
        reply = house.get("/health", headers={"x-request-id": odd})
        assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_every_kind_have_a_request_id(house: House, stream: bool):
    headers = {"x-request-id": "mine"}
    body = {"prompt": "a", "stream": stream}
    url = f"{house.url}/v1/completions"
    assert house.client.post(url, json=body, headers=headers).headers["x-request-id"] == "mine"
    assert house.get("/nope", headers=headers).headers["x-request-id"] == "mine"


def test_two_requests_may_carry_the_same_request_id(house: House):
    headers = {"x-request-id": "same"}
    for _ in range(2):
        reply = house.post("/v1/completions", {"prompt": "a"}, headers=headers)
        assert reply.status_code == 200


def test_without_a_key_only_health_and_ready_are_open():
    with open_house(api_keys=("one", "two")) as house:
        for path in ("/health", "/ready"):
            assert house.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/nope"):
            reply = house.get(path)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["x-request-id"]
        assert house.complete("a").status_code == 401
        key = {"authorization": "Bearer two"}
        assert house.get("/metrics", headers=key).text.count('reason="unauthorized"} 5.0') == 1


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer  one", 200),
        ("Bearer on", 401),
        ("Bearer one two", 401),
        ("Bearer", 401),
        ("one", 401),
        ("Basic one", 401),
        ("Bearer \u00fcnser", 401),
    ],
)
def test_any_of_the_keys_opens_and_nothing_else(keyed_house: House, header: str, status: int):
    reply = keyed_house.get("/v1/models", headers={"authorization": header.encode("latin-1")})
    assert reply.status_code == status


@pytest.fixture(scope="module")
def keyed_house():
    with open_house(api_keys=("one", "two")) as house:
        yield house


def test_an_unexpected_exception_is_a_500_with_an_id_and_no_details(caplog):
    with open_house() as house:

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a secret detail")

        house.engine.submit = broken  # type: ignore[method-assign]
        reply = house.complete("a")
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        assert "secret" not in reply.text
        assert reply.headers["x-request-id"]
        assert reply.headers["x-should-retry"] == "false"
        house.wait_until(lambda: "a secret detail" in caplog.text)
        house.wait_until_idle()
