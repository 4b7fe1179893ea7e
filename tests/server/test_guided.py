"""response_format and its relatives over HTTP: what is said, what ends it, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.grammar_trial import GrammarTrial
from jaxinfer.guidance import Guidance
from jaxinfer.guided import Guided
from jaxinfer.server.guided import guided_field
from jaxinfer.server.protocol import CompletionRequest
from tests.server.house import House, letter_tokenizer, open_house
from tests.server.test_bad_input import check

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "x": {"enum": ["a", "b"]}},
    "required": ["ok", "x"],
    "additionalProperties": False,
}
COUNTS = "((a{0,1000}){0,1000}){0,1000}"
FORMATS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "guided_json": SCHEMA,
    "json_schema": SCHEMA,
    "structured_outputs": {"json": SCHEMA},
}


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as house:
        yield house


def text_of(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("field", FORMATS)
def test_an_answer_is_json_of_the_schema_on_both_routes(house: House, field: str):
    for call in (house.complete, house.chat):
        value = json.loads(text_of(call("a", max_tokens=200, **{field: FORMATS[field]})))
        assert list(value) == ["ok", "x"]
        assert isinstance(value["ok"], bool)
        assert value["x"] in ("a", "b")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": "[x-z]{3}"}, "xyz"),
        ({"guided_choice": ["no", "yes"]}, "no"),
        ({"guided_grammar": 'root ::= "x" [yz]'}, "xy"),
        ({"grammar": 'start: "x" /[yz]/'}, "xy"),
        ({"structured_outputs": {"regex": "[x-z]{3}", "json": None}}, "xyz"),
        ({"structured_outputs": {"choice": ["no", "yes"]}}, "no"),
        ({"structured_outputs": {"grammar": 'start: "xy"'}}, "xy"),
    ],
)
def test_regexes_choices_and_grammars(house: House, fields: dict[str, Any], text: str):
    for call in (house.complete, house.chat):
        assert text_of(call("a", max_tokens=20, **fields)) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
)
def test_a_json_object_begins_with_a_brace(house: House, fields: dict[str, Any]):
    reply = house.chat("a", max_tokens=60, **fields).json()
    assert reply["choices"][0]["message"]["content"].startswith("{")


def test_a_stream_says_the_same_and_ends_with_stop(house: House):
    fields: dict[str, Any] = {"response_format": FORMATS["response_format"], "max_tokens": 200}
    whole = text_of(house.chat("a", **fields))
    events = house.chat("a", stream=True, **fields).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_every_choice_of_every_prompt_follows_it(house: House):
    reply = house.complete(["a", "3"], n=2, max_tokens=200, guided_json=SCHEMA).json()
    assert len(reply["choices"]) == 4
    assert all(json.loads(choice["text"])["x"] in ("a", "b") for choice in reply["choices"])


def test_an_answer_that_is_cut_says_length(house: House):
    reply = house.chat("a", max_tokens=3, guided_json=SCHEMA).json()
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format",
            "must hold an object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            "response_format",
            "must hold an object",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "text, json_object"),
        ({"response_format": {"schema": {}}}, "response_format", "text, json_object"),
        ({"response_format": "json"}, "response_format", "Expected"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": 5}, "guided_regex", "Expected"),
        ({"guided_regex": "a" * 20000}, "guided_regex", "at most 16384"),
        ({"guided_json": {"description": "a" * 2**20}}, "guided_json", "at most 131072"),
        ({"guided_choice": [""]}, "guided_choice", "non-empty strings"),
        ({"guided_choice": "ab"}, "guided_choice", "Expected"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"grammar": "hello"}, "grammar", "neither Lark"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json", "Invalid type"),
        ({"guided_json": "[1]"}, "guided_json", "object"),
        ({"json_schema": {"$ref": "#"}}, "json_schema", "cannot go on"),
        ({"json_schema": {"$ref": "http://127.0.0.1:1/"}}, "json_schema", "not present"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "non-empty string"),
        ({"guided_regex": "a", "grammar": "b"}, "grammar", "exclude each other"),
        (
            {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
            "response_format",
            "exclude each other",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    house: House, fields: dict[str, Any], param: str, words: str
):
    for call in (house.complete, house.chat):
        assert words in check(call("a", **fields), param=param)


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys((*FORMATS, "guided_regex", "guided_choice", "guided_grammar", "grammar")),
        {"response_format": {"type": "text"}, "guided_json": {}, "structured_outputs": {}},
        {"guided_regex": "", "guided_choice": [], "grammar": "", "guided_grammar": ""},
        {"structured_outputs": {"json": None, "json_object": False}},
    ],
)
def test_empty_values_ask_for_nothing(house: House, fields: dict[str, Any]):
    for call in (house.complete, house.chat):
        assert call("a", max_tokens=2, **fields).status_code == 200


def test_a_grammar_that_becomes_too_much_work_is_the_requests_fault(house: House):
    fields: dict[str, Any] = {"guided_regex": COUNTS, "max_tokens": 99, "ignore_eos": True}
    assert "cannot go on" in check(house.complete("a", **fields), param="guided_regex")
    events = house.complete("a", stream=True, **fields).text
    assert '"text":"a"' in events
    assert "cannot go on" in events
    house.wait_until_idle()


def test_a_field_becomes_one_rule():
    fields = CompletionRequest(prompt="a", guided_json='{"type": "null"}')
    assert guided_field(fields) == ("guided_json", Guided("json_schema", '{"type": "null"}'))
    assert guided_field(CompletionRequest(prompt="a")) is None
    with pytest.raises(InvalidRequest, match="guided_json must be a json_schema of at most"):
        guided_field(CompletionRequest(prompt="a", guided_json="x" * 2**20))


def test_an_endless_grammar_ends_its_request_while_the_server_goes_on():
    tokenizer = letter_tokenizer()
    trial = GrammarTrial(tokenizer, tokenizer.vocab_size, trial_s=1.0)
    guidance = Guidance(tokenizer, tokenizer.vocab_size, trial=trial)
    endless = "start: R\nR: " + " & ".join(f"/[ab]*a[ab]{{{i}}}/" for i in range(40))
    replies: list[Any] = []
    with open_house(guidance=guidance) as house:
        assert text_of(house.complete("a", guided_regex="x")) == "x"  # the process is there

        def send() -> None:
            replies.append(house.complete("a", grammar=endless))

        sender = threading.Thread(target=send)
        sender.start()
        num_looks = 0
        while sender.is_alive():
            assert house.get("/health").status_code == 200
            assert house.complete("3", max_tokens=9).status_code == 200
            num_looks += 1
            time.sleep(0.02)
        assert num_looks > 5
        assert "did not compile within 1 s" in check(replies[0], param="grammar")
        assert text_of(house.complete("a", guided_regex="x")) == "x"
    trial.close()
