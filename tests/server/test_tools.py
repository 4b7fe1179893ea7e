"""Tools over HTTP: what is refused, what the prompt holds, and calls whole and streamed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.house import MODEL, House, open_house
from tests.server.tool_templates import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a sum",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes_house() -> Iterator[House]:
    with open_house(template=HERMES, max_model_len=2048, num_pages=512) as house:
        yield house


@pytest.fixture
def house(hermes_house: House) -> Iterator[House]:
    yield hermes_house
    hermes_house.say(None)
    hermes_house.wait_until_idle()


def ask(house: House, text: str | None = None, **fields: Any) -> httpx.Response:
    if text is not None:
        house.say(text)
    return house.chat("1 + 2?", **{"tools": [ADD, NOW], **fields})


def choice_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def streamed(house: House, text: str | None, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices as a client joins them from a stream, in the shape of a whole answer."""
    reply = ask(house, text, stream=True, **fields)
    lines = [line for line in reply.text.split("\n\n") if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for line in lines:
        for part in json.loads(line.removeprefix("data: "))["choices"]:
            choice = choices.setdefault(part["index"], {"content": "", "tool_calls": []})
            assert "finish_reason" not in choice
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
            choice["content"] += part["delta"].get("content") or ""
            for delta in part["delta"].get("tool_calls", ()):
                join_call(choice["tool_calls"], delta)
    return choices


def join_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if "id" in delta:
        assert delta["index"] == len(calls)
        calls.append({"id": delta["id"], "type": delta["type"], "function": delta["function"]})
        return
    assert set(delta) == {"index", "function"}
    assert set(delta["function"]) == {"arguments"}
    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


def without_ids(calls: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    ids = [call["id"] for call in calls or ()]
    assert len(set(ids)) == len(ids)
    return [{**call, "id": None} for call in calls or ()]


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": None, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_call_has_openais_shape(house: House):
    choice = choice_of(ask(house, CALL))
    assert choice["message"].pop("tool_calls")[0].pop("id").startswith("call_")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None},
        "finish_reason": "tool_calls",
        "logprobs": None,
    }


SAID: list[tuple[str, str | None, list[dict[str, Any]], str]] = [
    ("Hello.", "Hello.", [], "stop"),
    (CALL, None, [call("add", '{"a": [1, 2]}')], "tool_calls"),
    (f"Hm. {CALL}", "Hm.", [call("add", '{"a": [1, 2]}')], "tool_calls"),
    (
        f"{CALL}\n{CALL_NOW}",
        None,
        [call("add", '{"a": [1, 2]}'), call("now", "{}")],
        "tool_calls",
    ),
    ("<tool_call>\n{'name'}\n</tool_call>", "<tool_call>\n{'name'}\n</tool_call>", [], "stop"),
    (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1]}',
        "]}",
        [call("add", '{"a": 1')],
        "stop",
    ),
]


@pytest.mark.parametrize(("text", "content", "calls", "finish"), SAID)
def test_a_stream_says_the_same_as_the_whole_answer(
    house: House, text: str, content: str | None, calls: list[Any], finish: str
):
    for fields in ({}, {"n": 2}):
        whole = choice_of(ask(house, text, **fields))
        message = whole["message"]
        assert (message["content"], whole["finish_reason"]) == (content, finish)
        assert without_ids(message.get("tool_calls")) == calls
        assert ("tool_calls" in message) == bool(calls)
        for choice in streamed(house, text, **fields).values():
            assert (choice["content"], choice["finish_reason"]) == (content or "", finish)
            assert without_ids(choice["tool_calls"]) == calls


def test_a_call_that_is_cut_ends_with_length_and_is_told_as_far_as_it_came(house: House):
    """FAILURES F50."""
    inside = CALL.index("[1") + 2
    for max_tokens, calls in ((20, []), (inside, [call("add", '{"a": [1')])):
        fields = {"max_tokens": max_tokens}
        whole = choice_of(ask(house, CALL, **fields))
        assert whole["finish_reason"] == "length"
        assert without_ids(whole["message"].get("tool_calls")) == calls
        assert whole["message"]["content"] == (None if calls else CALL[:20])
        choice = streamed(house, CALL, **fields)[0]
        assert choice["finish_reason"] == "length"
        assert without_ids(choice["tool_calls"]) == calls


def test_a_whole_call_at_the_limit_still_ends_with_length(house: House):
    whole = choice_of(ask(house, CALL, max_tokens=len(CALL)))
    assert whole["finish_reason"] == "length"
    assert without_ids(whole["message"]["tool_calls"]) == [call("add", '{"a": [1, 2]}')]


def test_a_stop_string_ends_with_stop(house: House):
    whole = choice_of(ask(house, f"{CALL}\nObservation", stop=["Obs"]))
    assert whole["finish_reason"] == "stop"
    assert len(whole["message"]["tool_calls"]) == 1


def test_content_streams_at_once_and_arguments_as_they_come(
    house: House, monkeypatch: pytest.MonkeyPatch
):
    """The model stops to think inside the arguments; all before it has arrived."""
    go, scripted = threading.Event(), house.runner.scripted
    place = len("ab") + CALL.index(", 2")

    def held(position: int) -> int:
        if position - house.runner.script_begins == place:
            assert go.wait(20)
        return scripted(position)

    monkeypatch.setattr(house.runner, "scripted", held)
    house.say(f"ab{CALL}")
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [ADD], "stream": True}
    url = f"{house.url}/v1/chat/completions"
    deltas: list[dict[str, Any]] = []
    with house.client.stream("POST", url, json=body, timeout=20) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        while sum(len(a) for a in arguments_of(deltas)) < len('{"a": [1'):
            deltas.append(json.loads(next(lines)[6:])["choices"][0]["delta"])
        assert "".join(arguments_of(deltas)) == '{"a": [1'
        go.set()
        deltas += [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    first = next(i for i, delta in enumerate(deltas) if "tool_calls" in delta)
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:first]) == "ab"
    assert deltas[first]["tool_calls"][0].pop("id")
    function = {"name": "add", "arguments": ""}
    begun = {"index": 0, "type": "function", "function": function}
    assert deltas[first] == {"tool_calls": [begun]}
    assert "".join(arguments_of(deltas)) == '{"a": [1, 2]}'
    assert deltas[-1] == {}


def arguments_of(deltas: list[dict[str, Any]]) -> list[str]:
    return [d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d]


def test_logprobs_of_a_call_are_one_per_token(house: House):
    whole = choice_of(ask(house, CALL, logprobs=True))
    assert len(whole["logprobs"]["content"]) == len(CALL) + 1
    reply = ask(house, CALL, logprobs=True, stream=True)
    lines = [line for line in reply.text.split("\n\n") if line.startswith("data: {")]
    found = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines]
    assert sum(len(p["content"]) for p in found if p) == len(CALL) + 1


def test_without_parallel_calls_there_is_at_most_one(house: House):
    text = f"{CALL}\n{CALL_NOW}"
    whole = choice_of(ask(house, text, parallel_tool_calls=False))
    assert without_ids(whole["message"]["tool_calls"]) == [call("add", '{"a": [1, 2]}')]
    assert whole["finish_reason"] == "tool_calls"
    assert len(streamed(house, text, parallel_tool_calls=False)[0]["tool_calls"]) == 1
    assert len(choice_of(ask(house, text, parallel_tool_calls=True))["message"]["tool_calls"]) == 2


def tokens_of(house: House, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    ids = house.post("/tokenize", body).json()["tokens"]
    return house.post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_the_prompt_holds_the_tools_unless_none_may_be_called(house: House):
    strict = {"name": "now", "strict": True}
    text = tokens_of(house, tools=[ADD, {"type": "function", "function": strict}])
    assert json.dumps(ADD) in text
    empty = '{"type": "object", "properties": {}}'
    assert f'{{"type": "function", "function": {{"name": "now", "parameters": {empty}}}}}' in text
    assert "add" not in tokens_of(house)
    size = [ask(house, "ok", **f).json()["usage"]["prompt_tokens"] for f in ({}, {"tools": None})]
    assert size[0] > size[1]
    none = ask(house, CALL, tool_choice="none")
    assert none.json()["usage"]["prompt_tokens"] == size[1]
    assert choice_of(none)["message"]["content"] == CALL
    assert choice_of(none)["finish_reason"] == "stop"


def test_a_conversation_goes_on_with_the_results(house: House):
    message = choice_of(ask(house, CALL))["message"]
    messages = [
        {"role": "user", "content": "1 + 2?"},
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"},
    ]
    house.say("It is 3.")
    body = {"messages": messages, "tools": [ADD]}
    reply = house.post("/v1/chat/completions", body)
    assert choice_of(reply)["message"]["content"] == "It is 3."
    prompt = house.post("/tokenize", body).json()["tokens"]
    text = house.post("/detokenize", {"tokens": prompt}).json()["prompt"]
    assert '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>' in text
    assert "<tool_response>\n3\n</tool_response>" in text


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tools": "f"}, "tools"),
    ({"tools": ["f"]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools"),
    ({"tools": function(name="")}, "tools"),
    ({"tools": function(name="a b")}, "tools"),
    ({"tools": function(name="f\n")}, "tools"),
    ({"tools": function(name="f" * 65)}, "tools"),
    ({"tools": function(name=1)}, "tools"),
    ({"tools": function(description=1)}, "tools"),
    ({"tools": function(strict="yes")}, "tools"),
    ({"tools": function(parameters="{}")}, "tools"),
    ({"tools": function(parameters=[])}, "tools"),
    ({"tools": function(parameters={"type": "string"})}, "tools"),
    ({"tools": function(parameters={"properties": {}})}, "tools"),
    ({"tools": function(parameters={"type": "object", "properties": []})}, "tools"),
    ({"tools": function(parameters={"type": "object", "properties": {"a": 1}})}, "tools"),
    ({"tools": function(parameters={"type": "object", "required": "a"})}, "tools"),
    ({"tools": function(parameters={"type": "object", "required": [1]})}, "tools"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [function(name=f"f{i}")[0] for i in range(129)]}, "tools"),
    ({"tools": function(description="x" * 300_000)}, "tools"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": 1}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "now"}}},
        "tool_choice",
    ),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
def test_malformed_tools_are_refused_by_name(house: House, fields: dict[str, Any], param: str):
    reply = house.chat("a", **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text


def test_deep_schemas_are_no_failure(house: House):
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    assert house.chat("a", tools=function(parameters=deep)).status_code in (200, 400)


@pytest.mark.parametrize("neutral", [{"tools": []}, {"tools": None, "tool_choice": "none"}])
def test_no_tools_are_no_tools(house: House, neutral: dict[str, Any]):
    assert choice_of(ask(house, CALL, **neutral))["message"]["content"] == CALL


def test_a_template_without_tools_says_so():
    with open_house() as house:
        error = house.chat("a", tools=[ADD]).json()["error"]
        assert error["param"] == "tools"
        assert "chat template does not know tools" in error["message"]
        assert house.chat("a", max_tokens=1, tools=[ADD], tool_choice="none").status_code == 200
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [ADD]}
        assert house.post("/tokenize", body).json()["error"]["param"] == "tools"


def test_a_format_that_nobody_knows_is_no_plain_text():
    with open_house(template="{{ tools }}{{ messages[0].content }}") as house:
        error = house.chat("a", tools=[ADD]).json()["error"]
        assert error["param"] == "tools"
        assert "--tool-call-parser (hermes, llama3_json, mistral)" in error["message"]


@pytest.mark.parametrize(
    ("template", "marks", "text", "name"),
    [
        (LLAMA3, ["<|python_tag|>"], '<|python_tag|>{"name": "add", "parameters": {}}', "add"),
        (LLAMA3, [], '{"name": "add", "parameters": {}}', "add"),
        (LLAMA3, ["<|python_tag|>"], "<|python_tag|>add()", None),
        (MISTRAL, ["[TOOL_CALLS]"], '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', "add"),
        (MISTRAL, ["[TOOL_CALLS]"], "[TOOL_CALLS]none", None),
        (MISTRAL_ARGS, ["[TOOL_CALLS]", "[ARGS]"], "[TOOL_CALLS]add[ARGS]{}", "add"),
        (HERMES, ["<tool_call>", "</tool_call>"], CALL, "add"),
        (HERMES, ["<tool_call>", "</tool_call>"], "<tool_call>add()</tool_call>", None),
    ],
)
def test_control_tokens_mark_calls_and_are_never_shown(
    template: str, marks: list[str], text: str, name: str | None
):
    with open_house(template=template, marks=marks, max_model_len=2048, num_pages=512) as house:
        whole = choice_of(ask(house, text))
        assert house.tokenizer.special_token_ids >= set(house.tokenizer.control_ids(marks).values())
        calls = whole["message"].get("tool_calls", [])
        assert [c["function"]["name"] for c in calls] == ([name] if name else [])
        shown = text
        for mark in marks:
            shown = shown.replace(mark, "")
        assert whole["message"]["content"] == (None if name else shown)
        choice = streamed(house, text)[0]
        assert choice["content"] == ("" if name else shown)
        assert without_ids(choice["tool_calls"]) == without_ids(calls)
        if template == MISTRAL:
            assert all(len(c["id"]) == 9 for c in calls)
        if marks and name is None:
            kept = choice_of(ask(house, text, skip_special_tokens=False))["message"]["content"]
            assert kept.startswith(text)


# ---- the official client


@pytest.fixture
def client(house: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_reads_calls(house: House, client: openai.OpenAI):
    house.say(CALL)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "1 + 2?"}],
        tools=[ADD],  # type: ignore[list-item]
        tool_choice="auto",
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    made = choice.message.tool_calls[0]
    assert made.type == "function"
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": [1, 2]})
    house.say("3")
    history: list[Any] = [
        {"role": "user", "content": "1 + 2?"},
        choice.message,
        {"role": "tool", "tool_call_id": made.id, "content": "3"},
    ]
    again = client.chat.completions.create(model=MODEL, messages=history, tools=[ADD])  # type: ignore[list-item]
    assert again.choices[0].message.content == "3"
    assert again.choices[0].message.tool_calls is None
    # An answer without calls has tool_calls null in the client's own object.
    history.append(again.choices[0].message.model_dump())
    house.say("4")
    last = client.chat.completions.create(model=MODEL, messages=history, tools=[ADD])  # type: ignore[list-item]
    assert last.choices[0].message.content == "4"


def test_the_official_client_joins_streamed_calls(house: House, client: openai.OpenAI):
    house.say(f"Hm.\n{CALL}\n{CALL_NOW}")
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "1 + 2?"}],
        tools=[ADD, NOW],  # type: ignore[list-item]
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == ("Hm.", "tool_calls")
    assert final.message.tool_calls is not None
    made = [(c.function.name, c.function.arguments) for c in final.message.tool_calls]
    assert made == [("add", '{"a": [1, 2]}'), ("now", "{}")]
