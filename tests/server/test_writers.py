"""Outputs into chunks and whole answers, and log-probabilities in both shapes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from jaxinfer.outputs import RequestOutput, TokenLogprob
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.logprobs import LOWEST, chat_logprobs, completion_logprobs
from jaxinfer.server.replies import encode
from jaxinfer.server.writers import ChatWriter, CompletionWriter, Shape
from jaxinfer.stats import RequestStats

CHARACTERS = {1: "a", 2: "é", 3: "b"}


class Speller:
    """1 is "a", 2 "é", 3 "b"; 20 and 21 are the two bytes of "é"."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in (20, 21):
            return "é".encode()[token_id - 20 : token_id - 19]
        return CHARACTERS[token_id].encode()


def shape(num_choices: int = 1, **fields: Any) -> Shape:
    return Shape("m", "v1", num_choices, fields.pop("wants_logprobs", False), Speller(), **fields)


def output(
    text: str = "", tokens: tuple[int, ...] = (1,), finish: FinishReason | None = None, index=0
) -> RequestOutput:
    stats = RequestStats(4, 3, len(tokens), 0, 0.0, 0.0, 0.0, 1.0) if finish else None
    logprobs = tuple(TokenLogprob(t, -1.0, ((t, -1.0),)) for t in tokens)
    return RequestOutput("r-0", index, text, tokens, logprobs, finish, stats=stats)


def load(payloads: list[bytes]) -> list[Any]:
    return [json.loads(p) for p in payloads]


def test_held_back_text_makes_no_chunk():
    writer = CompletionWriter(shape())
    assert writer.chunks(0, output("", (20,))) == []
    (chunk,) = load(writer.chunks(0, output("é", (21,))))
    assert chunk["choices"][0]["text"] == "é"


def test_logprobs_of_held_back_tokens_come_with_the_text_that_they_spell():
    writer = CompletionWriter(shape(wants_logprobs=True))
    assert writer.chunks(0, output("", (20,))) == []
    (chunk,) = load(writer.chunks(0, output("é", (21,))))
    assert len(chunk["choices"][0]["logprobs"]["tokens"]) == 2
    (later,) = load(writer.chunks(0, output("a", (1,))))
    assert later["choices"][0]["logprobs"]["text_offset"] == [2]


def test_logprobs_of_a_last_token_without_text_come_before_the_finish():
    writer = ChatWriter(shape(wants_logprobs=True))
    last = output("", (3,), FinishReason.STOP)
    tokens, finish = load(writer.chunks(0, last))
    assert tokens["choices"][0]["delta"] == {"content": ""}
    assert len(tokens["choices"][0]["logprobs"]["content"]) == 1
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["choices"][0]["delta"] == {}


def test_text_and_finish_of_one_output_are_two_chunks():
    writer = CompletionWriter(shape())
    text, finish = load(writer.chunks(0, output("a", (1,), FinishReason.LENGTH)))
    assert (text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == ("a", None)
    assert (finish["choices"][0]["text"], finish["choices"][0]["finish_reason"]) == ("", "length")


def test_usage_counts_tokens_of_all_choices_and_cached_ones_once_per_prompt():
    writer = CompletionWriter(shape(2, include_usage=True))
    writer.tally.prompt = 4
    writer.chunks(0, output("a", (1, 3), FinishReason.STOP))
    writer.chunks(1, output("a", (1,), FinishReason.STOP, index=1))
    (last,) = load(writer.closing())
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_without_include_usage_nothing_comes_last():
    assert CompletionWriter(shape()).closing() == []


def test_chat_opens_with_a_role_per_choice_and_completions_with_nothing():
    opening = load(ChatWriter(shape(2)).opening())
    assert [c["choices"][0]["index"] for c in opening] == [0, 1]
    assert all(c["choices"][0]["delta"] == {"role": "assistant", "content": ""} for c in opening)
    assert CompletionWriter(shape(2)).opening() == []


def test_a_whole_answer_joins_its_outputs():
    writer = ChatWriter(shape(wants_logprobs=True))
    writer.add(0, output("a"))
    writer.add(0, output("é", (2,), FinishReason.STOP))
    body = json.loads(encode(writer.whole()))
    choice = body["choices"][0]
    assert choice["message"]["content"] == "aé"
    assert [t["token"] for t in choice["logprobs"]["content"]] == ["a", "é"]
    assert body["usage"]["completion_tokens"] == 2


def test_ids_differ():
    assert ChatWriter(shape()).id != ChatWriter(shape()).id


def test_parts_of_a_character_have_their_bytes_and_a_replacement_as_text():
    found = chat_logprobs([TokenLogprob(20, -0.5, ((1, -0.7),))], Speller()).content[0]
    assert (found.token, found.bytes) == ("\ufffd", [0xC3])
    assert found.top_logprobs[0].token == "a"


def test_the_chosen_token_is_among_the_top_ones_of_a_completion():
    found = completion_logprobs([TokenLogprob(1, -3.0, ((3, -0.1),))], Speller(), offset=5)
    assert found.top_logprobs == [{"a": -3.0, "b": -0.1}]
    assert found.text_offset == [5]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_what_json_cannot_say_is_the_lowest_value(value: float):
    token = TokenLogprob(1, value, ((3, value),))
    chat = chat_logprobs([token], Speller()).content[0]
    assert (chat.logprob, chat.top_logprobs[0].logprob) == (LOWEST, LOWEST)
    plain = completion_logprobs([token], Speller(), offset=0)
    assert plain.token_logprobs == [LOWEST]
    assert plain.top_logprobs == [{"a": LOWEST, "b": LOWEST}]
