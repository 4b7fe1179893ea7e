"""What models write -> content and calls: the same for every split of the text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import pytest

from jaxinfer.server.tool_calls.hermes import HermesParser
from jaxinfer.server.tool_calls.json_call import JsonText
from jaxinfer.server.tool_calls.llama3 import Llama3Parser
from jaxinfer.server.tool_calls.mistral import MistralParser
from jaxinfer.server.tool_calls.parser import ToolParser
from jaxinfer.server.tool_calls.pieces import CallDelta, Piece

Calls = list[tuple[str, str]]  # name, arguments
OPEN, CLOSE = "<tool_call>", "</tool_call>"
NOW = '{"name": "now", "arguments": {}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
ADD_ARGUMENTS = '{"a": 1, "b": [2, {"c": "}"}]}'
LLAMA_ADD = '{"name": "add", "parameters": {"a": 1}}'
LLAMA_NOW = '{"name": "now", "parameters": {}}'
TAG = "<|python_tag|>"


def parser(
    kind: type[ToolParser], *, hidden: Sequence[str] = (), max_calls: int | None = None
) -> ToolParser:
    ids = count()
    return kind(
        names=["now", "add"],
        hidden=hidden,
        new_id=lambda: f"id{next(ids)}",
        max_calls=max_calls,
    )


def joined(pieces: Iterable[Piece]) -> tuple[str, Calls]:
    """As a client joins them."""
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            content += piece
        elif piece.name is not None:
            assert piece == CallDelta(len(calls), "", f"id{len(calls)}", piece.name)
            calls.append([piece.name, ""])
        else:
            assert (piece.index, piece.id) == (len(calls) - 1, None)
            assert piece.arguments
            calls[-1][1] += piece.arguments
    return content, [(name, arguments) for name, arguments in calls]


def run(reader: ToolParser, parts: Iterable[str]) -> tuple[str, Calls, bool]:
    pieces = [piece for part in parts for piece in reader.push(part)]
    content, calls = joined([*pieces, *reader.finish()])
    return content, calls, reader.has_whole_calls


def splits(text: str) -> Iterable[list[str]]:
    """All in two, by character, and some at random."""
    yield [text]
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    dice = random.Random(text)
    for _ in range(20):
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(2, 9)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


CASES: dict[str, tuple[type[ToolParser], str, str, Calls, bool]] = {
    # ---- Hermes
    "no call": (HermesParser, "Hi <b>you</b>, 1 < 2\n ", "Hi <b>you</b>, 1 < 2\n ", [], False),
    "one call": (HermesParser, f"{OPEN}\n{NOW}\n{CLOSE}", "", [("now", "{}")], True),
    "call in one line": (HermesParser, OPEN + NOW + CLOSE, "", [("now", "{}")], True),
    "text before": (
        HermesParser,
        f"Let me see.\n\n{OPEN}\n{ADD}\n{CLOSE}\n",
        "Let me see.",
        [("add", ADD_ARGUMENTS)],
        True,
    ),
    "two calls": (
        HermesParser,
        f"{OPEN}\n{NOW}\n{CLOSE}\n{OPEN}\n{ADD}\n{CLOSE}",
        "",
        [("now", "{}"), ("add", ADD_ARGUMENTS)],
        True,
    ),
    "text before two calls": (
        HermesParser,
        f"a\n{OPEN}\n{NOW}\n{CLOSE}\n{OPEN}\n{NOW}\n{CLOSE}\n",
        "a",
        [("now", "{}"), ("now", "{}")],
        True,
    ),
    "text between and behind": (
        HermesParser,
        f"a {OPEN}{NOW}{CLOSE} b\n{OPEN}{NOW}{CLOSE}\n\nc ",
        "a b\n\nc ",
        [("now", "{}"), ("now", "{}")],
        True,
    ),
    "no closing mark": (HermesParser, f"{OPEN}\n{NOW}", "", [("now", "{}")], True),
    "half a closing mark": (HermesParser, f"{OPEN}\n{NOW}\n</tool", "", [("now", "{}")], True),
    "another mark instead of the closing one": (
        HermesParser,
        f"{OPEN}{NOW}\n{OPEN}{NOW}",
        "",
        [("now", "{}"), ("now", "{}")],
        True,
    ),
    "text instead of the closing mark": (
        HermesParser,
        f"{OPEN}{NOW}\n</tool_x> so",
        "\n</tool_x> so",
        [("now", "{}")],
        True,
    ),
    "arguments first": (
        HermesParser,
        OPEN + '{"arguments": {"a": "\\u00e9"}, "id": [7, "name"], "name": "add"}' + CLOSE,
        "",
        [("add", '{"a": "\\u00e9"}')],
        True,
    ),
    "blanks in the object": (
        HermesParser,
        OPEN + '{ "name" :\t"now" , "arguments" : { "x" : -1.5e+3 } }' + CLOSE,
        "",
        [("now", '{ "x" : -1.5e+3 }')],
        True,
    ),
    "a function nobody offered": (
        HermesParser,
        OPEN + '{"name": "wéird", "arguments": {}}' + CLOSE,
        "",
        [("wéird", "{}")],
        True,
    ),
    "marks inside strings": (
        HermesParser,
        OPEN + '{"name": "add", "arguments": {"s": "</tool_call><tool_call>{\\"name\\""}}' + CLOSE,
        "",
        [("add", '{"s": "</tool_call><tool_call>{\\"name\\""}')],
        True,
    ),
    "the beginning of a mark": (HermesParser, "a <tool_cal", "a <tool_cal", [], False),
    "a mark alone": (HermesParser, f"a {OPEN} ", f"a {OPEN} ", [], False),
    "no JSON": (HermesParser, f"a {OPEN}\nnow()\n{CLOSE}", f"a {OPEN}\nnow()\n{CLOSE}", [], False),
    "JSON that is no call": (
        HermesParser,
        f'{OPEN}{{"name": "now"}}{CLOSE}',
        f'{OPEN}{{"name": "now"}}{CLOSE}',
        [],
        False,
    ),
    "arguments that are no object": (
        HermesParser,
        f'{OPEN}{{"name": "now", "arguments": "{{}}"}}{CLOSE}',
        f'{OPEN}{{"name": "now", "arguments": "{{}}"}}{CLOSE}',
        [],
        False,
    ),
    "a call after one that is none": (
        HermesParser,
        f"{OPEN}{{'name'{OPEN}{NOW}{CLOSE}",
        f"{OPEN}{{'name'",
        [("now", "{}")],
        True,
    ),
    "cut in the name": (
        HermesParser,
        OPEN + '\n{"name": "ad',
        OPEN + '\n{"name": "ad',
        [],
        False,
    ),
    "cut in the arguments": (
        HermesParser,
        OPEN + '\n{"name": "add", "arguments": {"a": 12',
        "",
        [("add", '{"a": 12')],
        False,
    ),
    "cut behind the arguments": (
        HermesParser,
        OPEN + '{"name": "add", "arguments": {"a": 12}',
        "",
        [("add", '{"a": 12}')],
        False,
    ),
    "a fault in the arguments": (
        HermesParser,
        OPEN + '{"name": "add", "arguments": {"a": 1,,}}' + CLOSE,
        ",}}" + CLOSE,
        [("add", '{"a": 1,')],
        False,
    ),
    "a second call with a fault": (
        HermesParser,
        f"{OPEN}{NOW}{CLOSE}\n{OPEN}{{]{CLOSE}",
        f"{OPEN}{{]{CLOSE}",
        [("now", "{}")],
        True,
    ),
    # ---- Llama 3
    "plain text": (Llama3Parser, 'So {"name"', 'So {"name"', [], False),
    "bare object": (Llama3Parser, LLAMA_ADD, "", [("add", '{"a": 1}')], True),
    "bare object behind blanks": (Llama3Parser, f"\n {LLAMA_NOW}\n", "", [("now", "{}")], True),
    "tagged object": (Llama3Parser, TAG + LLAMA_ADD, "", [("add", '{"a": 1}')], True),
    "tagged and said arguments": (Llama3Parser, TAG + ADD, "", [("add", ADD_ARGUMENTS)], True),
    "text, then the tag": (
        Llama3Parser, f"Well. {TAG} {LLAMA_NOW}", "Well.", [("now", "{}")], True,
    ),
    "two bare objects": (
        Llama3Parser,
        f"{LLAMA_NOW}; {LLAMA_ADD}",
        "",
        [("now", "{}"), ("add", '{"a": 1}')],
        True,
    ),
    "two objects in two lines": (
        Llama3Parser,
        f"{LLAMA_NOW}\n{TAG}{LLAMA_ADD}",
        "",
        [("now", "{}"), ("add", '{"a": 1}')],
        True,
    ),
    "JSON content": (Llama3Parser, '{"a": [1, 2]}', '{"a": [1, 2]}', [], False),
    "JSON content with a name": (
        Llama3Parser,
        ' {"name": "Ann", "parameters": {}}',
        ' {"name": "Ann", "parameters": {}}',
        [],
        False,
    ),
    "a typed object": (
        Llama3Parser,
        '{"type": "function", "name": "now", "parameters": {}}',
        "",
        [("now", "{}")],
        True,
    ),
    "a tagged function nobody offered": (
        Llama3Parser,
        TAG + '{"name": "other", "parameters": {}}',
        "",
        [("other", "{}")],
        True,
    ),
    "code behind the tag": (Llama3Parser, f"{TAG}print(1)", f"{TAG}print(1)", [], False),
    "a call, then text": (Llama3Parser, f"{LLAMA_NOW} done", "done", [("now", "{}")], True),
    "a call, then an object": (
        Llama3Parser,
        LLAMA_NOW + '; {"a": 1}',
        '; {"a": 1}',
        [("now", "{}")],
        True,
    ),
    "a cut bare object": (Llama3Parser, '{"name": "no', '{"name": "no', [], False),
    # ---- Mistral
    "no calls": (MistralParser, "It is [TOOL] time", "It is [TOOL] time", [], False),
    "a list": (
        MistralParser,
        f"[TOOL_CALLS] [{NOW}, {ADD}]",
        "",
        [("now", "{}"), ("add", ADD_ARGUMENTS)],
        True,
    ),
    "a list without its end": (MistralParser, f"[TOOL_CALLS][{NOW}", "", [("now", "{}")], True),
    "a list with ids and text around": (
        MistralParser,
        f'So: [TOOL_CALLS][{NOW[:-1]}, "id": "abcdefghi"}}]\nok',
        "So:\nok",
        [("now", "{}")],
        True,
    ),
    "an empty list": (MistralParser, "[TOOL_CALLS][]", "[TOOL_CALLS][]", [], False),
    "a list with a fault": (
        MistralParser,
        f"[TOOL_CALLS][{NOW}, now]",
        ", now]",
        [("now", "{}")],
        True,
    ),
    "a name": (MistralParser, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", '{"a": 1}')], True),
    "names": (
        MistralParser,
        'Hm.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
        "Hm.",
        [("add", '{"a": 1}'), ("now", "{}")],
        True,
    ),
    "a name with an id": (
        MistralParser,
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        "",
        [("now", "{}")],
        True,
    ),
    "a name without a mark": (MistralParser, "[TOOL_CALLS]now{}", "", [("now", "{}")], True),
    "a name cut in its arguments": (
        MistralParser, '[TOOL_CALLS]add[ARGS]{"a', "", [("add", '{"a')], False,
    ),
    "a sentence behind the mark": (
        MistralParser,
        "[TOOL_CALLS] I will {",
        "[TOOL_CALLS] I will {",
        [],
        False,
    ),
    "a long name": (
        MistralParser, "[TOOL_CALLS]" + "n" * 300, "[TOOL_CALLS]" + "n" * 300, [], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_content_and_calls_are_found_for_every_split(case: str):
    kind, text, content, calls, is_whole = CASES[case]
    for parts in splits(text):
        assert run(parser(kind), parts) == (content, calls, is_whole), parts


FRAGMENTS = [
    *(OPEN, CLOSE, TAG, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", NOW, ADD, LLAMA_NOW, LLAMA_ADD),
    *(
        "<tool",
        "[TOOL",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        ";",
        " ",
        "\n",
        "\n\n",
        "a",
        "now",
        "{}",
    ),
    *(
        '{"name": "',
        '"now"',
        ', "arguments": ',
        "[TOOL_CALLS]now[ARGS]{}",
        f"{OPEN}\n{NOW}\n{CLOSE}",
    ),
]


@pytest.mark.parametrize("kind", [HermesParser, Llama3Parser, MistralParser])
@pytest.mark.parametrize("hides", [False, True])
def test_random_texts_are_read_alike_for_every_split_and_lose_nothing(
    kind: type[ToolParser], hides: bool
):
    dice = random.Random(kind.__name__)
    hidden = kind.marks if hides else ()
    num_calls = 0
    for _ in range(200):
        text = "".join(dice.choices(FRAGMENTS, k=dice.randrange(1, 12)))
        content, calls, is_whole = found = run(parser(kind, hidden=hidden), [text])
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for parts in (list(text), pieces):
            assert run(parser(kind, hidden=hidden), parts) == found, parts
        num_calls += is_whole
        if not calls:
            for mark in hidden:
                text = text.replace(mark, "")
            assert content == text
    assert num_calls > 10


@pytest.mark.parametrize(
    ("kind", "mark", "text", "content"),
    [
        (Llama3Parser, TAG, f"a {TAG}print(1) {TAG}", "a print(1) "),
        (MistralParser, "[TOOL_CALLS]", "x [TOOL_CALLS] no", "x  no"),
        (MistralParser, "[ARGS]", "x [ARGS]{} [TOOL_CALLS][[ARGS]", "x {} [TOOL_CALLS]["),
        (HermesParser, CLOSE, f"{OPEN}{{'{CLOSE}", f"{OPEN}{{'"),
    ],
)
def test_a_mark_that_is_a_control_token_is_never_shown(
    kind: type[ToolParser], mark: str, text: str, content: str
):
    for parts in splits(text):
        assert run(parser(kind, hidden=[mark]), parts) == (content, [], False), parts


def test_calls_over_the_limit_are_left_out():
    text = f"a {OPEN}{NOW}{CLOSE} b {OPEN}{ADD}{CLOSE} c"
    for parts in splits(text):
        found = run(parser(HermesParser, max_calls=1), parts)
        assert found == ("a b c", [("now", "{}")], True)


def test_a_call_is_told_as_it_comes():
    reader = parser(HermesParser)
    assert reader.push("Yes") == ["Yes"]
    assert reader.push(f".\n{OPEN}") == ["."]
    assert reader.push('\n{"name": "ad') == []
    assert reader.push('d", "arguments"') == []
    assert reader.push(': {"a') == [CallDelta(0, "", "id0", "add"), CallDelta(0, '{"a')]
    assert reader.push('": 1') == [CallDelta(0, '": 1')]
    assert reader.push("}}\n</tool_call>") == [CallDelta(0, "}")]
    assert reader.finish() == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a<", "a"), ("a <tool", "a"), ("a<b", "a<b"), ("a \n", "a"), ("<tool_d", "<tool_d")],
)
def test_only_what_may_begin_a_mark_is_held(text: str, shown: str):
    assert "".join(str(p) for p in parser(HermesParser).push(text)) == shown


def test_json_that_is_no_call_is_shown_as_soon_as_that_is_clear():
    for text in ('{"answer"', '{"name": "Ann"', '{"name": 1', '{"parameters": []', "[1"):
        assert "".join(map(str, parser(Llama3Parser).push(text))) == text
    assert parser(Llama3Parser).push('{"name": "no') == []


VALID: list[Any] = [
    {}, {"a": None}, {"a": [True, False, 0, -0.5, 1e10, 12.25, [], [[]], {}]}, {"": "\\\"\n\té😀"},
    {"a": {"b": {"c": [{"d": "e"}]}}},
]  # fmt: skip
INVALID = [
    "[]",
    '"a"',
    "1",
    "{",
    "{}}",
    '{"a"}',
    '{"a":}',
    '{"a":1,}',
    "{,}",
    "{a:1}",
    "{'a':1}",
    '{"a":[1,]}',
    '{"a":01}',
    '{"a":.5}',
    '{"a":1.}',
    '{"a":1.e5}',
    '{"a":+1}',
    '{"a":1e}',
    '{"a":-}',
    '{"a":nul}',
    '{"a":NaN}',
    '{"a":"\n"}',
    '{"a":"\\x"}',
    '{"a":"\\u12g4"}',
    '{"a":[}',
    '{"a":{]',
    '{"a" 1}',
    '{"a":1 2}',
    '{"a":[1 2]}',
    '{"a":tru}',
    '{"a":[,1]}',
    '{"a"::1}',
    '{"a":' + "1" * 65 + "}",
]


def reads(text: str) -> bool:
    reader = JsonText()
    return all(map(reader.take, text)) and reader.is_whole


@pytest.mark.parametrize("value", VALID)
def test_good_json_is_read(value: Any):
    for indent in (None, 2):
        for is_ascii in (True, False):
            assert reads(json.dumps(value, indent=indent, ensure_ascii=is_ascii))


@pytest.mark.parametrize("text", INVALID)
def test_bad_json_is_not(text: str):
    assert not reads(text)


def test_damaged_json_is_read_as_the_library_reads_it():
    dice = random.Random(1)
    text = json.dumps({"a": [True, None, -1.5e-3, 'x\\"é\u00e9', {}], "b": {"c": [0, 10]}})
    num_good = 0
    for _ in range(3000):
        place = dice.randrange(1, len(text))
        damaged = (
            text[:place] + dice.choice('{}[]",:\\u0e+-.t 1') + text[place + dice.randrange(2) :]
        )
        try:
            is_good = isinstance(json.loads(damaged), dict)
        except ValueError:
            is_good = False
        num_good += is_good
        assert reads(damaged) == is_good, damaged
    assert num_good > 100
