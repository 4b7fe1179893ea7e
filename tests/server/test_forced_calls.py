"""tool_choice required and by name: a grammar forces the call, whatever the model would say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.house import open_house
from tests.server.test_tools import ask, choice_of, streamed
from tests.server.tool_templates import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS

PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}
BY_NAME = {"type": "function", "function": {"name": "pick"}}


def check_call(call: dict[str, Any]) -> None:
    assert call["function"]["name"] == "pick"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["a"] in ("x", "y")
    assert arguments["b"] in (True, False)


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (HERMES, []),
        (HERMES, ["<tool_call>", "</tool_call>"]),
        (LLAMA3, ["<|python_tag|>"]),
        (MISTRAL, ["[TOOL_CALLS]"]),
        (MISTRAL_ARGS, ["[TOOL_CALLS]", "[ARGS]"]),
    ],
)
def test_a_required_call_is_made_by_any_model(template: str, marks: list[str]):
    """The runner counts; under a grammar it says the next character that is admitted."""
    with open_house(template=template, marks=marks, max_model_len=2048, num_pages=512) as house:
        forced: list[dict[str, Any]] = [
            {"tools": [PICK], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [OTHER, PICK], "tool_choice": BY_NAME},
        ]
        for fields in forced:
            choice = choice_of(ask(house, max_tokens=300, **fields))
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            check_call(call)
            joined = streamed(house, None, max_tokens=300, **fields)[0]
            assert (joined["content"], joined["finish_reason"]) == ("", "tool_calls")
            check_call(joined["tool_calls"][0])


def test_a_forced_call_that_is_cut_ends_with_length_and_excludes_other_grammars():
    with open_house(template=HERMES, max_model_len=2048, num_pages=512) as house:
        forced: dict[str, Any] = {"tools": [PICK], "tool_choice": "required"}
        assert choice_of(ask(house, max_tokens=5, **forced))["finish_reason"] == "length"
        reply = ask(house, response_format={"type": "json_object"}, **forced)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "tool_choice"
        bad = {"type": "object", "properties": {"a": {"type": "no such type"}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
        reply = ask(house, tools=[tool], tool_choice="required")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "tools"
