"""What a rule for an answer may be, before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.errors import InvalidRequest
from jaxinfer.guided import MAX_CHARS, Guided
from jaxinfer.scheduling.request import Request
from tests.fakes import make_engine

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"regex": "a+"}, Guided("regex", "a+")),
        ({"grammar": 'start: "a"'}, Guided("grammar", 'start: "a"')),
        ({"choice": ["é", 'a"']}, Guided("choice", '["é", "a\\""]')),
        ({"choice": ("a",)}, Guided("choice", '["a"]')),
        ({"json_object": True}, Guided("json_object")),
        ({"json_schema": {"type": "null"}}, Guided("json_schema", '{"type":"null"}')),
        ({"json_schema": '{"type": "null"}'}, Guided("json_schema", '{"type": "null"}')),
        (Guided("regex", "a"), Guided("regex", "a")),
    ],
)
def test_a_rule_is_kept_as_its_kind_and_a_text(value: Any, expected: Guided):
    sampling = SamplingParams(guided=value)
    assert sampling.guided == sampling.grammar == expected
    assert hash(dataclasses.replace(sampling, n=2)) == hash(SamplingParams(guided=value, n=2))


def test_a_schema_keeps_the_order_of_its_properties():
    assert Guided.json_schema(SCHEMA).text.index('"b"') < Guided.json_schema(SCHEMA).text.index(
        '"a"'
    )


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], "regex", 5, True, {"regex": "a", "choice": ["a"]}, {"schema": {}}, {5: "a"}),
        *({"regex": ""}, {"regex": 5}, {"regex": None}, {"grammar": ["a"]}),
        *({"choice": []}, {"choice": "ab"}, {"choice": [""]}, {"choice": [1]}, {"choice": None}),
        *({"json_object": False}, {"json_object": {}}, {"json_object": 1}),
        *({"json_schema": True}, {"json_schema": []}, {"json_schema": {"a": {1}}}),
    ],
)
def test_anything_else_is_refused_by_name(value: Any):
    with pytest.raises(InvalidRequest, match="guided must be") as caught:
        SamplingParams(guided=value)
    assert caught.value.param == "guided"


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema", "choice"])
def test_a_text_over_the_limit_is_refused_and_one_at_it_is_not(kind: Any):
    Guided(kind, "a" * MAX_CHARS[kind])
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CHARS[kind]} characters"):
        Guided(kind, "a" * (MAX_CHARS[kind] + 1))


def test_a_schema_of_a_megabyte_is_refused():
    schema = {"properties": {f"property_{i}": {"type": "string"} for i in range(30_000)}}
    with pytest.raises(InvalidRequest, match="json_schema of at most 131072 characters"):
        SamplingParams(guided={"json_schema": schema})


def test_an_engine_does_not_ignore_a_rule_that_nobody_compiled():
    sampling = SamplingParams(guided={"regex": "a"})
    with pytest.raises(InvalidRequest, match="guided needs a compiled constraint"):
        make_engine().submit(Request("r", (1,), sampling))
