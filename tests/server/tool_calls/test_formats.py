"""Which format a template speaks of, what templates print, and grammars that force calls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxinfer.chat_template import ChatTemplate
from jaxinfer.errors import InvalidRequest
from jaxinfer.server.tool_calls.formats import PARSERS, ToolFormat, format_for
from jaxinfer.server.tool_calls.grammar import call_grammar
from jaxinfer.server.tool_calls.mistral import new_id, with_short_ids
from jaxinfer.server.tool_calls.pieces import CallDelta
from tests.server.house import TEMPLATE
from tests.server.tool_templates import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, QWEN3_CODER

ADD = {"type": "object", "properties": {"a": {"$ref": "#/$defs/int"}}, "required": ["a"],
       "additionalProperties": False, "$defs": {"int": {"type": "integer"}}}  # fmt: skip
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "description": "é", "parameters": ADD}}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def known(source: str, parser: str = "auto") -> ToolFormat:
    found = format_for(parser, source)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("source", "name"),
    [(HERMES, "hermes"), (LLAMA3, "llama3_json"), (MISTRAL, "mistral"), (MISTRAL_ARGS, "mistral")],
)
def test_the_format_shows_in_the_template(source: str, name: str):
    assert known(source).name == name
    assert template(source).reads_tools


@pytest.mark.parametrize("source", ["", TEMPLATE, QWEN3_CODER, "<tool_call>", "{{ tools }}"])
def test_other_templates_show_none(source: str):
    assert format_for("auto", source) is None


def test_the_format_can_be_named_whatever_the_template_says():
    for parser in PARSERS[1:-1]:
        assert known(TEMPLATE, parser).name == parser
    assert format_for("none", HERMES) is None


def test_a_template_that_never_looks_at_tools_says_so():
    assert not template(TEMPLATE).reads_tools
    assert not template("{% set tools = 1 %}{{ tools }}").reads_tools
    assert template("{% if tools %}{{ raise_exception('no') }}{% endif %}").reads_tools


def answered(call_id: str) -> list[dict[str, Any]]:
    """A history with a call as clients send it: arguments are a JSON string, content is null."""
    function = {"name": "add", "arguments": '{"a": 1, "é": [null]}'}
    return [
        {"role": "user", "content": "1?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": "one"}]},
    ]


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        (
            HERMES,
            '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "é": [null]}}\n</tool_call>',
        ),
        (HERMES, "<|im_start|>user\n<tool_response>\none\n</tool_response><|im_end|>"),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1, "é": [null]}}<|eot_id|>'),
        (LLAMA3, '<|ipython|>"one"<|eot_id|>'),
        (MISTRAL, '{"name": "add", "arguments": {"a": 1, "é": [null]}, "id": "abcdefgh1"}]</s>'),
        (MISTRAL, '[TOOL_RESULTS] {"content": one, "call_id": "abcdefgh1"}[/TOOL_RESULTS]'),
        (MISTRAL_ARGS, '[TOOL_CALLS]add[ARGS]{"a": 1, "é": [null]}</s>'),
    ],
)
def test_calls_and_results_of_the_history_are_printed_as_the_model_knows_them(source, printed):
    text = template(source).render(answered("abcdefgh1"), tools=[TOOL])
    assert printed in text
    assert '"description": "é"' in text


@pytest.mark.parametrize("source", [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS])
def test_a_printed_call_is_read_back_as_the_same_call(source: str):
    text = template(source).render(answered("abcdefgh1"), add_generation_prompt=False)
    said = re.split(r"assistant(?:\||>|\n)*|\[/INST\]|<\|im_end\|>|<\|eot_id\|>|</s>", text)
    fmt = known(source)
    reader = fmt.parser(names=["add"], hidden=(), new_id=new_id)
    calls = [part for part in said if '"a"' in part]
    pieces = [*reader.push(calls[0]), *reader.finish()]
    found = [p for p in pieces if isinstance(p, CallDelta)]
    assert [found[0].name, json.loads(found[1].arguments)] == ["add", {"a": 1, "é": [None]}]
    assert "".join(p for p in pieces if isinstance(p, str)).strip() == ""


@pytest.mark.parametrize("absent", [None, []])
@pytest.mark.parametrize("source", [HERMES, LLAMA3, MISTRAL])
def test_a_message_without_calls_is_an_ordinary_one(source: str, absent: Any):
    """Clients send the fields of their own message objects back, null ones too."""
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    dumped = [plain[0], {**plain[1], "tool_calls": absent}]
    assert template(source).render(dumped) == template(source).render(plain)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (5, "tool_calls must be a list"),
        ("f", "tool_calls must be a list"),
        ({"a": 1}, "tool_calls must be a list"),
        ([5], r"tool_calls\[0\] must be an object with function.name"),
        ([{"function": {"arguments": "{}"}}], r"tool_calls\[0\] must be"),
        ([{"function": {"name": 1}}], r"tool_calls\[0\] must be"),
    ],
)
def test_malformed_calls_in_the_history_are_refused(calls: Any, words: str):
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    with pytest.raises(InvalidRequest, match=words):
        template(HERMES).render([message])


@pytest.mark.parametrize("arguments", [None, ""])
def test_absent_arguments_are_an_empty_object(arguments: Any):
    call = {"function": {"name": "now", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert '"arguments": {}' in template(HERMES).render([message])


def test_ids_made_elsewhere_become_ids_of_nine_everywhere_alike():
    first, second = (with_short_ids(answered(i)) for i in ("call_0123456789", "call_012345678"))
    call, result = first[1]["tool_calls"][0]["id"], first[2]["tool_call_id"]
    assert call == result
    assert re.fullmatch("[a-zA-Z0-9]{9}", call)
    assert second[2]["tool_call_id"] != call
    assert with_short_ids(answered("abcDEF123")) == answered("abcDEF123")
    assert "[TOOL_RESULTS]" in template(MISTRAL).render(first)
    odd = ["x", {"role": "assistant", "tool_calls": ["x", {"id": 5}]}, {"tool_calls": 5}]
    assert with_short_ids(odd) == odd


def test_new_ids_differ_and_have_the_length_that_the_model_wants():
    for source, length in ((HERMES, 29), (LLAMA3, 29), (MISTRAL, 9)):
        ids = {known(source).new_id() for _ in range(50)}
        assert len(ids) == 50
        assert {len(i) for i in ids} == {length}
    assert new_id().isalnum()


def test_developers_speak_as_system_where_the_template_knows_no_developer():
    said = [{"role": "developer", "content": "be kind"}]
    assert template(TEMPLATE).render(said) == "<s>be kind"
    assert template(TEMPLATE + "{# developer #}").render(said) == "<d>be kind"
    assert said[0]["role"] == "developer"


# ---- grammars


BYTES = [bytes([i]) for i in range(256)]
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]


class Vocabulary:
    """One token per byte, the marks as control tokens from 256 on, then the end."""

    bos_token_id = None
    eos_token_id = 256 + len(MARKS)
    tokens = [*BYTES, *(mark.encode() for mark in MARKS), b"<end>"]  # noqa: RUF012
    special_token_ids = list(range(256, 257 + len(MARKS)))  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def admits(grammar: str, text: str, *, control: bool) -> bool:
    """Whether `text` is a whole answer by `grammar`."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()))
    compiled = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(tokenizer, compiled)
    assert not matcher.is_error(), matcher.get_error()
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text) if control else [text]
    ids = [i for p in parts for i in ([256 + MARKS.index(p)] if p in MARKS else p.encode())]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


ZERO = '{"name": "now", "KEY": {}}'
ONE = '{"name": "add", "KEY": {"a": 1}}'
GRAMMARS: list[tuple[str, list[str], list[str]]] = [  # template, admitted, refused
    (
        HERMES,
        [
            f"<tool_call>\n{ONE}\n</tool_call>",
            f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{ZERO}\n</tool_call>",
        ],
        [
            "",
            ONE,
            f"Well. <tool_call>\n{ONE}\n</tool_call>",
            f"<tool_call>\n{ONE}",
            '<tool_call>\n{"name": "sub", "KEY": {"a": 1}}\n</tool_call>',
            '<tool_call>\n{"name": "now", "KEY": {"a": 1}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "KEY": {"a": "1"}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "KEY": {}}\n</tool_call>',
        ],
    ),
    (LLAMA3, [ONE], [f"{ONE}; {ONE}", f"<|python_tag|>{ONE}", '{"name": "add"}']),
    (
        MISTRAL,
        [f"[TOOL_CALLS] [{ONE}]", f"[TOOL_CALLS] [{ONE}, {ONE}]"],
        [f"[TOOL_CALLS] [{ONE}", "[TOOL_CALLS] []", f"[TOOL_CALLS] [{ONE},]"],
    ),
    (
        MISTRAL_ARGS,
        ['[TOOL_CALLS]add[ARGS]{"a": 1}', '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 2}'],
        ["[TOOL_CALLS]add[ARGS]{}", '[TOOL_CALLS]add{"a": 1}', '[TOOL_CALLS]sub[ARGS]{"a": 1}'],
    ),
]  # fmt: skip


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize(("source", "good", "bad"), GRAMMARS)
def test_a_grammar_admits_the_calls_that_the_parser_reads_and_nothing_else(
    source: str, good: list[str], bad: list[str], control: bool
):
    fmt = known(source)
    ids = {mark: 256 + i for i, mark in enumerate(MARKS)} if control else {}
    grammar = call_grammar(fmt.style, {"add": ADD, "now": NOW}, is_single=False, control_ids=ids)
    key = "parameters" if source == LLAMA3 else "arguments"
    for text in good:
        said = text.replace("KEY", key)
        assert admits(grammar, said, control=control), said
        reader = fmt.parser(names=["add", "now"], hidden=(), new_id=new_id)
        pieces = [*reader.push(said), *reader.finish()]
        assert all(isinstance(piece, CallDelta) for piece in pieces)
        assert reader.has_whole_calls
    for text in bad:
        assert not admits(grammar, text.replace("KEY", key), control=control), text


@pytest.mark.parametrize("source", [HERMES, MISTRAL, MISTRAL_ARGS])
def test_a_grammar_can_ask_for_exactly_one_call(source: str):
    ((good, twice),) = [texts for s, texts, _ in GRAMMARS if s == source]
    grammar = call_grammar(
        known(source).style, {"add": ADD, "now": NOW}, is_single=True, control_ids={}
    )
    assert admits(grammar, good.replace("KEY", "arguments"), control=False)
    assert not admits(grammar, twice.replace("KEY", "arguments"), control=False)
