"""Where sentences end, in many scripts and however the text comes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from jaxinfer.sentence_end import SentenceEnds

RANDOM_PARTS = (
    *(
        "He left",
        "the",
        "Dr",
        "e.g",
        "3",
        "No",
        "J",
        "Ok",
        "is it",
        "x@y",
        "www.a",
        "说",
        "吗",
        "え",
    ),
    *("नमस्ते", "ولد", "sí", "Ç", "[", "(", '"', ")", "”", "」", "*", "**", "'", "`", "`x`"),
    *(
        ".",
        ".",
        ".",
        "..",
        "...",
        "…",
        "!",
        "?",
        "。",
        "！",
        "？",
        "؟",
        "۔",
        "।",
        "։",
        "។",
        "።",
        "．",
    ),
    *(" ", " ", " ", "  ", "\n", "\n", "\n\n", "\n\n\n", "\t", ":", "：", "- ", "1. ", "a) ", "# "),
    *("```", "```py", "~~~", "````", "`", "~", "\n```\n", "\n~~~\n", "| a |", "• "),
)


MARKS = "!?…‼‽⁇⁈⁉.．﹒。！？؟۔।॥։។።"
PLAIN = "。！？؟۔।॥։។።"
CLOSERS = "\"'“*_~)]}”’»」』）"


def ends(text: str, *, is_cut: bool = False) -> list[str]:
    """The text up to each boundary that is certain while it comes and no closer moves on."""
    reader, found = SentenceEnds(), list[int]()
    for character in text:
        reader.feed(character)
        if reader.sentence >= 0 and reader.sentence not in found:
            if found and not text[found[-1] : reader.sentence].strip(MARKS + CLOSERS):
                found.pop()
            found.append(reader.sentence)
    if is_cut:
        reader.finish()
        if reader.sentence not in (*found, -1):
            found.append(reader.sentence)
    return [text[a:b] for a, b in zip([0, *found], found, strict=False)]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("He left. She did too! Did they? Yes", ["He left.", " She did too!", " Did they?"]),
        ("He said “Go.” Then he (slowly.) Went", ["He said “Go.”", " Then he (slowly.)"]),
        ("**Done.** Next", ["**Done.**"]),
        ("Well… Yes", ["Well…"]),
        ("Eso. ¿Qué? ¡No! Á", ["Eso.", " ¿Qué?", " ¡No!"]),
        ("In 1999. Then", ["In 1999."]),
        ("See main.py. Then", ["See main.py."]),
        ("昨日は雨。今日は晴れ！「本当？」はい", ["昨日は雨。", "今日は晴れ！", "「本当？」"]),
        ("你好吗?我很好", ["你好吗?"]),
        ("वह गया। वह आया॥ अब", ["वह गया।", " वह आया॥"]),
        ("هل جاء؟ نعم۔ ثم", ["هل جاء؟", " نعم۔"]),
        ("Նա գնաց։ Հետո", ["Նա գնաց։"]),
        ("គាត់ទៅ។ បន្ទាប់", ["គាត់ទៅ។"]),
        ("እሱ ሄደ። ከዚያ", ["እሱ ሄደ።"]),
        ("A line\nand more\n\nNext", ["A line\nand more"]),
        ("A line \n \nNext", ["A line"]),
        ("- one\n- two\nrest", ["- one", "\n- two"]),
        ("1. One\n2) Two\n| a | b |\n", ["1. One", "\n2) Two", "\n| a | b |"]),
    ],
)
def test_sentences_end_where_readers_see_it(text: str, sentences: list[str]):
    assert ends(text) == sentences


@pytest.mark.parametrize(
    "text",
    [
        *(
            "It is 3.5 m",
            "v1.2.3 x",
            "see a.py and b",
            "at http://a.b/c?d=e. f",
            "a!b c",
            "x@y.z w",
        ),
        *("Dr. Who", "Mr. J. R. Smith", "e.g. This", "U.S. Army", "etc. And", "vs. Him", "No. 5"),
        *("Fig. 3 shows", "1. First", "a. First", "approx. five", "“Go!” he said", "well… maybe"),
        *("No end here", "One line\nand another", "Steps:\n\nx", "步骤：\n\nx", "# Title\n\nx"),
        *("- Fruits:\n  x", "...", ". .", ""),
    ],
)
def test_these_are_no_ends(text: str):
    assert ends(text) == []


@pytest.mark.parametrize(
    ("text", "is_end"),
    [
        *(("He left.", True), ("He left. ", True), ("He left.”", True), ("Really?", True)),
        *(("Well...", True), ("说。", True), ("It is 3.", False), ("In 1999. ", True)),
        *(("Dr.", False), ("J.", False), ("1.", False), ("No. ", False), ("www.a.", False)),
        *(("http://x/a.", False), ("me@x.", False), ("e.g.", False), ("He left", False)),
        *(("Line\n", False), ("```\nx\n```", True), ("```\nx\n``", False), ("```\nx.", False)),
    ],
)
def test_a_cut_behind_a_mark_is_an_end_if_no_more_could_have_made_it_none(text: str, is_end: bool):
    assert (ends(text, is_cut=True) == [text.rstrip()]) is is_end


def test_inside_a_code_block_no_sentence_ends_but_lines_do():
    reader = SentenceEnds()
    reader.feed("Look.\n```py\nx = 1. \n\ny. Z\n")
    assert (reader.sentence, reader.line) == (5, len("Look.\n```py\nx = 1. \n\ny. Z"))
    reader.feed("```\nA")
    assert reader.sentence == len("Look.\n```py\nx = 1. \n\ny. Z\n```")


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        *(("```\nhe. B", True), ("~~~~ py\nhe. B", True), ("  ```\nhe. B", True)),
        *(("```\na\n```\nSo he. B", False), ("~~~\n```\nhe. B", True), ("````\n```\nhe. B", True)),
        *(("```a``` b\nSo he. B", False), ("``\nSo he. B", False), ("x ```\nSo he. B", False)),
        ("```\na\n``` x\nhe. B", True),
    ],
)
def test_what_opens_and_closes_a_code_block(text: str, is_open: bool):
    reader = SentenceEnds()
    reader.feed(text)
    assert (reader.sentence < len(text) - 2) is is_open


def test_a_paragraph_right_before_a_code_block_ends():
    assert ends("Look\n```\nx") == ["Look"]
    assert ends("Look:\n```\nx") == []


# ---- the same rules over the whole text at once


def code_spans(text: str) -> Iterator[tuple[int, int]]:
    """Of what is between the line that opens a block and the end of the line that closes it."""
    opened, start, at = "", 0, 0
    for line in text.splitlines(keepends=True):
        body, is_whole = line.rstrip("\n"), line.endswith("\n")
        at += len(line)
        if not opened:
            found = re.fullmatch(r"\s*((`{3,})[^`]*|(~{3,}).*)", body)
            if found and is_whole:
                opened, start = found[2] or found[3], at
        elif re.fullmatch(rf"\s*{opened}{opened[0]}*\s*", body) and is_whole:
            yield start, at
            opened = ""
    if opened:
        yield start, len(text) + 1


def plain_ends(text: str) -> set[int]:
    """Every boundary that the text behind it has made certain."""
    spans = list(code_spans(text))
    found = set(_line_ends(text, spans))
    run = rf"[{MARKS}][{MARKS}{re.escape(CLOSERS)}]*"
    for match in re.finditer(rf"({run})(?=(\s*)(\S|$))", text):
        if _is_code(match.start(), spans):
            continue
        first = next((place for place in range(*match.span()) if text[place] in PLAIN), None)
        if first is not None:
            found |= set(range(first + 1, match.end() + 1))
        elif _is_end(text, match, spans):
            found.add(match.end())
    return found


def _is_code(place: int, spans: list[tuple[int, int]]) -> bool:
    return any(a <= place < b for a, b in spans)


def _is_end(text: str, match: re.Match[str], spans: list[tuple[int, int]]) -> bool:
    run, gap, following = match.groups()
    if not following or _is_code(match.start(3), spans):
        return False
    is_period = run.strip(CLOSERS) in (".", "．")
    if not gap:
        return not is_period and following in "说吗えनو"
    word = re.search(r"\S*\Z", text[: match.start()])
    assert word is not None
    bare = word[0].lstrip("\"'“‘«„¿¡([{<*_~-–—/")
    if following.islower() or not is_period:
        return not following.islower()
    begins_line = not text[: word.start()].rpartition("\n")[2].strip()
    if bare in ("", "Dr", "e.g", "J", "Ç") or (bare.isdecimal() and begins_line):
        return False
    return not (bare == "No" and following.isdecimal())


def _line_ends(text: str, spans: list[tuple[int, int]]) -> Iterator[int]:
    at, last = 0, -1
    code = False
    for line in text.split("\n")[:-1]:
        was_code, code = code, any(a <= at + len(line) + 1 < b for a, b in spans)
        body, start, at = line.strip(), at, at + len(line) + 1
        end = start + len(line.rstrip())
        if was_code:
            if not code:
                yield end
            continue
        if code or not body:
            if last >= 0:
                yield last
            last = -1
        elif body.endswith((":", "：")) or re.match(r"\s{0,3}#{1,6}\s", line):
            last = -1
        else:
            last = end
            if re.match(r"\s*([-*+•|]|\(?(\d{1,9}|[^\W\d_])[.)])\s", line):
                yield end


def random_text(choose: random.Random) -> str:
    return "".join(choose.choice(RANDOM_PARTS) for _ in range(choose.randint(1, 25)))


def test_ends_found_as_the_text_comes_are_those_of_the_whole():
    choose = random.Random(11)
    for _ in range(1000):
        text, reader, found = random_text(choose), SentenceEnds(), set[int]()
        for character in text:
            reader.feed(character)
            found |= {reader.sentence} - {-1}
        assert found <= plain_ends(text), repr(text)
        assert max(found, default=-1) == max(plain_ends(text), default=-1), repr(text)


def test_any_split_gives_the_same_ends_and_possible_ends():
    choose = random.Random(12)
    for _ in range(300):
        text = random_text(choose)
        by_one, at_once = SentenceEnds(), SentenceEnds()
        for character in text:
            by_one.feed(character)
        at_once.feed(text)
        for reader in (by_one, at_once):
            reader.finish()
        assert (by_one.sentence, by_one.line) == (at_once.sentence, at_once.line)


def test_an_end_was_possible_before_it_was_certain_and_what_is_possible_can_come_true():
    choose = random.Random(13)
    more = ("A", " A", "\n", "\n\n", ".", "\n```\n", "```\n", "``\n", "`\n", "~~~\n", "~~\n", "~\n")
    for _ in range(150):
        text = random_text(choose)
        reader = SentenceEnds()
        reader.feed(text)
        before = max(reader.sentence, reader.line)
        possible = [p for p in reader.possible if p > before]
        for place in possible:
            came = [follow(text, rest) for rest in more] + [follow(text, "\nA")]
            assert any(place in ends for ends in came), (text, place)
        for rest in more:
            early = {end for end in follow(text, rest) if before < end < len(text)}
            assert early <= set(possible), (text, rest)


def follow(text: str, rest: str) -> set[int]:
    """Ends of either kind that are certain, one character after the other, or by the cut."""
    reader, found = SentenceEnds(), set[int]()
    reader.feed(text)
    for character in rest:
        reader.feed(character)
        found |= {reader.sentence, reader.line}
    reader.finish()
    return found | {reader.sentence, reader.line}


def test_a_long_line_without_a_blank_costs_as_much_as_its_length():
    reader = SentenceEnds()
    for _ in range(20_000):
        reader.feed("a.b")
        assert reader.possible == ()
    assert reader.sentence == -1
