"""Answers that the server's cap ends: where, and how they say so."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.server.sampling import capped_sampling
from jaxinfer.server.state import Limits
from tests.server.house import House, letter_tokenizer, open_house

SAID = "bc. Da" + "bc. Da" * 50  # after "a"


def teach(house: House) -> None:
    """After c comes a period, then a blank and a D."""
    tokenizer = letter_tokenizer()
    for before, after in ("c.", ". ", " D", "Da"):
        house.runner._next[tokenizer.encode(before)[0]] = tokenizer.encode(after)[0]


@pytest.fixture
def capped() -> Generator[House]:
    """With a cap of 20 tokens: text is held back behind the tenth."""
    with open_house(limits=Limits(max_output_tokens=20)) as house:
        teach(house)
        yield house


def streamed(house: House, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], Any]:
    """The text, the choice that ends it, and the usage."""
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = house.post(path, body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    (end,) = (c for c in choices if c["finish_reason"])
    return text, end, events[-1]["usage"]


def test_a_chat_ends_at_the_last_sentence_and_says_so(capped: House):
    messages = [{"role": "user", "content": "a"}]
    reply = capped.chat("a").json()
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == SAID[:15] == "bc. Dabc. Dabc."
    assert choice["finish_reason"] == "length"
    assert choice["truncation"] == {"max_output_tokens": 20, "at": "sentence"}
    assert reply["usage"]["completion_tokens"] == 20
    text, end, usage = streamed(capped, "/v1/chat/completions", {"messages": messages})
    assert (text, end["truncation"]) == (choice["message"]["content"], choice["truncation"])
    assert usage == reply["usage"]


def test_completions_are_cut_by_token_and_say_so(capped: House):
    (choice,) = capped.complete("a", max_tokens=100).json()["choices"]
    assert choice["text"] == SAID[:20]
    assert choice["truncation"] == {"max_output_tokens": 20, "at": "token"}
    text, end, _ = streamed(capped, "/v1/completions", {"prompt": "a", "max_tokens": 100})
    assert (text, end["truncation"]) == (choice["text"], choice["truncation"])


@pytest.mark.parametrize("max_tokens", [13, 20])
def test_a_request_that_asks_for_no_more_than_the_cap_gets_exactly_that(
    capped: House, max_tokens: int
):
    (choice,) = capped.chat("a", max_completion_tokens=max_tokens).json()["choices"]
    assert choice["message"]["content"] == SAID[:max_tokens]
    assert choice["finish_reason"] == "length"
    assert "truncation" not in choice


def test_every_token_that_was_computed_has_its_logprobs_also_where_its_text_was_dropped(
    capped: House,
):
    (choice,) = capped.chat("a", logprobs=True).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == SAID[:20]


def test_a_text_without_an_end_in_the_window_is_cut_by_token(capped: House):
    (choice,) = capped.chat("d").json()["choices"]
    assert choice["message"]["content"] == "efghijklmnopqrstuvwx"
    assert choice["truncation"]["at"] == "token"


def test_a_text_that_ends_by_itself_before_the_cap_is_whole(capped: House):
    (choice,) = capped.chat("9", max_completion_tokens=50).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("876543210", "stop")
    (choice,) = capped.chat("a", stop="abc. Dab").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("bc. D", "stop")
    assert "truncation" not in choice


def test_the_cap_is_never_an_error(capped: House):
    for fields in ({"max_tokens": 10**6}, {"max_tokens": 250}, {"min_tokens": 100}):
        reply = capped.chat("a" * 240, **fields)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == "length"
    assert "truncation" not in choice, "the model's context ended it, not the cap"


@pytest.mark.parametrize(
    ("truncate", "of_chat", "of_completion"), [("sentence", 15, 15), ("token", 20, 20)]
)
def test_the_flag_holds_for_both(truncate: Any, of_chat: int, of_completion: int):
    with open_house(limits=Limits(max_output_tokens=20, truncate=truncate)) as house:
        teach(house)
        assert house.chat("a").json()["choices"][0]["message"]["content"] == SAID[:of_chat]
        text = house.complete("a", max_tokens=99).json()["choices"][0]["text"]
        assert text == SAID[:of_completion]


def test_the_smaller_of_the_servers_and_the_classs_cap_holds():
    params = SamplingParams(max_tokens=50)

    def cap(server: int | None, of_class: int | None) -> int | None:
        capped = capped_sampling(params, server_cap=server, class_cap=of_class, truncate="sentence")
        return capped.binding_cap

    assert [cap(9, None), cap(None, 8), cap(9, 8), cap(7, 8), cap(None, None)] == [9, 8, 8, 7, None]
    assert [cap(50, None), cap(49, None), cap(51, 60)] == [None, 49, None]
