"""What a new version must say before it gets a call."""

from __future__ import annotations

import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.server.smoke import Recorded, _difference, read_recorded


def test_records_are_json_lines_of_prompts_or_conversations():
    lines = """
    {"prompt": "a", "text": "bcd", "max_tokens": 3}

    {"messages": [{"role": "user", "content": "a"}], "text": "", "max_tokens": 256, "more": 1}
    """
    assert read_recorded(lines) == (
        Recorded("a", "bcd", 3),
        Recorded(({"role": "user", "content": "a"},), "", 256),
    )
    assert read_recorded("") == ()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        "{}",
        '{"prompt": "a", "max_tokens": 3}',
        '{"prompt": "a", "messages": [], "text": "b", "max_tokens": 3}',
        '{"prompt": 7, "text": "b", "max_tokens": 3}',
        '{"messages": 7, "text": "b", "max_tokens": 3}',
        '{"messages": ["a"], "text": "b", "max_tokens": 3}',
        '{"prompt": "a", "text": 7, "max_tokens": 3}',
        '{"prompt": "a", "text": "b", "max_tokens": 0}',
        '{"prompt": "a", "text": "b", "max_tokens": 257}',
        '{"prompt": "a", "text": "b", "max_tokens": true}',
    ],
)
def test_a_bad_record_is_named_by_its_line(line: str):
    good = '{"prompt": "a", "text": "b", "max_tokens": 3}\n'
    with pytest.raises(InvalidRequest, match=r"recorded outputs, line 2: expected \{") as caught:
        read_recorded(good + line)
    assert caught.value.param == "recorded"


def test_there_are_at_most_so_many_records():
    with pytest.raises(InvalidRequest, match="257 recorded outputs, but at most 256"):
        read_recorded('{"prompt": "a", "text": "b", "max_tokens": 3}\n' * 257)


def test_a_difference_far_into_a_text_is_shown_where_it_is():
    expected, found = "a" * 100 + "b" * 100, "a" * 100 + "c" * 100
    told = _difference(1, 2, expected, found)
    assert told == (
        f"recorded output 1 of 2: expected {'a' * 40 + 'b' * 40!r}, found "
        f"{'a' * 40 + 'c' * 40!r} from character 60 on"
    )
    assert _difference(1, 1, "ab", "abc").endswith("expected 'ab', found 'abc'")
