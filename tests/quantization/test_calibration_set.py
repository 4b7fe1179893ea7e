"""Reading calibration sets: three forms of lines, kinds, hashes, and every refusal by its line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.calibration_set import (
    BUILT_IN,
    KINDS,
    SHORT_TOKENS,
    CalibrationSet,
    Kind,
    Sample,
    read_calibration_set,
)
from jaxinfer.quantization.held_out import MANUAL_CHARS, held_out_set, manual_texts
from tests.tiny_tokenizers import byte_fallback, byte_level, wrapped

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
)
PLAIN = wrapped(byte_level())
CHAT = wrapped(byte_level(), chat_template=TEMPLATE)
ASKED = {"role": "user", "content": "hello"}
ANSWERED = {"role": "assistant", "content": "yes"}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "set.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_each_form_of_line_becomes_a_sample_of_its_kind(tmp_path: Path):
    path = written(
        tmp_path,
        {"text": "hello"},
        "",
        {"text": "ab" * 4 * SHORT_TOKENS},
        {"messages": [ASKED, ANSWERED]},
        {"messages": [ASKED, ANSWERED, ASKED]},
        {"token_ids": [5, 6], "tokenizer": CHAT.hash},
        {"token_ids": [5, 6], "tokenizer": CHAT.hash, "kind": "multi_turn"},
    )
    found = read_calibration_set(path, CHAT)
    assert found.name == "set.jsonl"
    assert [s.kind for s in found.samples] == [
        *("short", "long", "short", "multi_turn", "short", "multi_turn")
    ]
    assert list(found.samples[0].token_ids) == CHAT.encode("hello")
    assert list(found.samples[3].token_ids) == CHAT.encode_chat([ASKED, ANSWERED, ASKED])
    assert found.samples[4].token_ids == (5, 6)


def test_a_text_that_spells_a_control_token_is_plain_text(tmp_path: Path):
    path = written(tmp_path, {"text": "<|im_end|>"})
    (sample,) = read_calibration_set(path, CHAT).samples
    assert not CHAT.special_token_ids & set(sample.token_ids)


def test_a_model_without_a_chat_template_reads_chats_as_paragraphs(tmp_path: Path):
    path = written(tmp_path, {"messages": [ASKED, ANSWERED]})
    (sample,) = read_calibration_set(path, PLAIN).samples
    assert PLAIN.decode(sample.token_ids) == "user: hello\n\nassistant: yes"


def test_the_hash_is_over_the_token_ids_alone():
    samples = (Sample("short", (1, 2)), Sample("long", (3,)))
    expected = hashlib.sha256(b"1,2\n3\n").hexdigest()
    assert CalibrationSet.of("a", samples).hash == expected
    assert CalibrationSet.of("b", [Sample("long", (1, 2)), samples[1]]).hash == expected
    assert CalibrationSet.of("a", [Sample("short", (1, 2, 3))]).hash != expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected a JSON object on one line"),
        ("[1]", r"line 2: expected a JSON object; got \[1\]"),
        ({"txt": "a"}, "line 2: .*none of them"),
        ({"text": "a", "messages": []}, "line 2: .*text and messages"),
        ({"text": " \n"}, "line 2: text must be a string that is not blank"),
        ({"text": 7}, "line 2: text must be a string that is not blank; got 7"),
        ({"messages": []}, "line 2: messages must be a list of at least one"),
        ({"messages": ["a"]}, "line 2: each of messages must be an object"),
        ({"messages": [{"role": "user"}]}, "line 2: .*content must be a string"),
        ({"token_ids": [1]}, "line 2: its token_ids were made with tokenizer None"),
        ({"token_ids": [], "tokenizer": CHAT.hash}, "line 2: the sample has no tokens"),
        ({"token_ids": [True], "tokenizer": CHAT.hash}, "line 2: token_ids must be a list of int"),
        ({"token_ids": [10**6], "tokenizer": CHAT.hash}, "line 2: token id 1000000 is outside"),
        ({"token_ids": [-1], "tokenizer": CHAT.hash}, "line 2: token id -1 is outside"),
        (
            {"token_ids": [1], "tokenizer": CHAT.hash, "kind": "odd"},
            "line 2: kind must be one of short, long, multi_turn; got 'odd'",
        ),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: Any, message: str):
    path = written(tmp_path, {"text": "hello"}, line)
    with pytest.raises(ConfigError, match=message):
        read_calibration_set(path, CHAT)


def test_ids_of_another_tokenizer_are_refused_with_both_hashes(tmp_path: Path):
    other = wrapped(byte_fallback())
    path = written(tmp_path, {"token_ids": [1], "tokenizer": other.hash})
    with pytest.raises(ConfigError, match=f"{other.hash}.*{CHAT.hash}"):
        read_calibration_set(path, CHAT)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str):
    with pytest.raises(ConfigError, match="holds no samples"):
        read_calibration_set(written(tmp_path, content), CHAT)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration_set(tmp_path / "none.jsonl", CHAT)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as a UTF-8 text"):
        read_calibration_set(tmp_path / "binary", CHAT)


def test_a_split_keeps_every_kind_on_both_sides_and_loses_nothing():
    counts: dict[Kind, int] = {"short": 8, "multi_turn": 4, "long": 5}
    at = iter(range(sum(counts.values())))
    samples = [Sample(kind, (next(at),)) for kind, count in counts.items() for _ in range(count)]
    whole = CalibrationSet.of("a", samples)
    learned, kept = whole.split(4)
    assert {s.kind for s in learned.samples} == {s.kind for s in kept.samples} == set(KINDS)
    assert [s.token_ids for s in kept.samples] == [(3,), (7,), (15,), (11,)]
    assert {*learned.samples, *kept.samples} == set(whole.samples)
    with pytest.raises(ValueError, match="at least 2"):
        whole.split(1)


def test_the_built_in_set_says_that_it_is_small_and_holds_every_kind():
    built_in = read_calibration_set(None, CHAT)
    assert built_in.name == BUILT_IN
    assert "small" in BUILT_IN
    assert {s.kind for s in built_in.samples} == set(KINDS)


def test_held_out_texts_are_long_enough_and_none_is_a_calibration_text():
    manual = list(manual_texts())
    assert sum(map(len, manual)) == MANUAL_CHARS
    assert not any("\n   " in text for text in manual)
    held_out = held_out_set(None, PLAIN)
    assert len(held_out.samples) > len(manual)
    calibration = {s.token_ids for s in read_calibration_set(None, PLAIN).samples}
    assert not calibration & {s.token_ids for s in held_out.samples}


def test_held_out_texts_may_be_a_file(tmp_path: Path):
    assert held_out_set(written(tmp_path, {"text": "hello"}), PLAIN).name == "set.jsonl"
