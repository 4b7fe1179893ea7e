"""Streaming is exact: whatever the tokens, the pushes and the stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.detokenizer import Detokenizer, StopMatch, find_stop
from jaxinfer.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_fallback, byte_level, metaspace, special, wrapped

KINDS = {
    "byte_level": wrapped(byte_level()),
    "byte_fallback": wrapped(byte_fallback()),
    "byte_fallback_unstripped": wrapped(byte_fallback(strips=False)),
    "metaspace": wrapped(metaspace()),
}
BYTES = KINDS["byte_level"]


class Stream:
    """A Detokenizer that is given several tokens at once, and all the text that it released."""

    def __init__(self, inner: Detokenizer):
        self.inner = inner
        self.text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        return self._released("".join(map(self.inner.push, token_ids)))

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        return self._released(self.inner.finish(token_ids))

    @property
    def stopped_by(self) -> str | None:
        return self.inner.stopped_by

    @property
    def num_tokens(self) -> int:
        return self.inner.num_tokens

    def _released(self, text: str) -> str:
        self.text += text
        return text


def detokenizer(tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), **changes: Any) -> Stream:
    plain: dict[str, Any] = {
        "skip_special_tokens": True,
        "stop": (),
        "include_stop_str_in_output": False,
    }
    return Stream(Detokenizer(tokenizer, prompt_ids=prompt_ids, **{**plain, **changes}))


def spell(text: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return tokenizer.encode(text)


def byte_ids(data: bytes) -> list[int]:
    """One token per byte of a byte-level vocabulary."""
    own = {
        BYTES.token_bytes(i): i for i in range(BYTES.vocab_size) if len(BYTES.token_bytes(i)) == 1
    }
    return [own[bytes([byte])] for byte in data]


def whole_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The definition: what decoding adds to the prompt's text."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    return after[min(len(before), len(after)) if common is None else common :]


def stopped_text(
    tokenizer: Tokenizer,
    prompt: list[int],
    output: list[int],
    skip: bool,
    stops: list[str],
    include: bool,
    min_tokens: int,
) -> str:
    """Character by character: the text ends at the first place where a stop string ends."""
    whole = whole_text(tokenizer, prompt, output, skip)
    for end in range(1, len(whole) + 1):
        met = [stop for stop in stops if whole[:end].endswith(stop)]
        if met and token_that_brought(tokenizer, prompt, output, skip, end) >= min_tokens:
            return whole[: end if include else end - max(map(len, met))]
    return whole


def token_that_brought(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool, end: int
) -> int:
    """How many output tokens it takes until the text's first `end` characters are there."""
    whole = whole_text(tokenizer, prompt, output, skip)
    return next(
        count
        for count in range(len(output) + 1)
        if whole_text(tokenizer, prompt, output[:count], skip)[:end] == whole[:end]
    )


def pieces_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(places)]


def id_lists(tokenizer: Tokenizer, max_size: int = 14) -> st.SearchStrategy[list[int]]:
    """Real text, arbitrary tokens (most often no UTF-8 at all), and both in a row."""
    texts = st.text(alphabet="abcthe .日ďé🌶\n", max_size=8).map(tokenizer.encode)
    noise = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=5)
    single = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] >= b"\x80"]
    high = st.lists(st.sampled_from(single), max_size=6) if single else st.just([])
    parts = st.lists(st.one_of(texts, noise, high), max_size=4)
    return parts.map(lambda lists: [i for part in lists for i in part][:max_size])


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_any_split_streams_the_text_of_the_whole(kind, data):
    tokenizer = KINDS[kind]
    prompt = data.draw(id_lists(tokenizer, 6))
    output = data.draw(id_lists(tokenizer))
    skip = data.draw(st.booleans())
    pieces = pieces_of(output, data.draw(st.lists(st.integers(0, 99), max_size=6)))
    stream = detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    text = "".join(map(stream.push, pieces)) + stream.finish()
    assert text == stream.text == whole_text(tokenizer, prompt, output, skip)
    assert stream.stopped_by is None
    assert stream.num_tokens == len(output)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_split_stops_at_the_same_place_and_leaks_nothing(kind, data):
    tokenizer = KINDS[kind]
    prompt = data.draw(id_lists(tokenizer, 4))
    output = data.draw(id_lists(tokenizer))
    whole = whole_text(tokenizer, prompt, output, True)
    place = st.integers(0, max(0, len(whole) - 1))
    taken = st.tuples(place, st.integers(1, 5)).map(lambda p: whole[p[0] : sum(p)] or "a")
    stops = data.draw(st.lists(st.one_of(taken, st.sampled_from(["ab", "abc", "bca"])), max_size=4))
    include = data.draw(st.booleans())
    # When U+FFFD is certain is a matter of the next byte; that of a real character is not.
    is_plain = "\ufffd" not in "".join(stops)
    min_tokens = data.draw(st.sampled_from([0, 1, 3, 6])) if is_plain else 0
    pieces = pieces_of(output, data.draw(st.lists(st.integers(0, 99), max_size=6)))
    stream = detokenizer(
        tokenizer, prompt, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    shown = ""
    expected = stopped_text(tokenizer, prompt, output, True, stops, include, min_tokens)
    for piece in pieces:
        shown += stream.push(piece)
        assert expected.startswith(shown)
    assert shown + stream.finish() == stream.text == expected
    assert (stream.stopped_by is None) or stream.stopped_by in stops


@settings(deadline=None, max_examples=100)
@given(ids=id_lists(BYTES), prompt=id_lists(BYTES, 5))
def test_nothing_but_a_started_character_is_held_without_stop_strings(ids, prompt):
    stream = detokenizer(BYTES, prompt)
    for count, token in enumerate(ids, 1):
        stream.push([token])
        certain = whole_text(BYTES, prompt, ids[:count], True)
        assert certain.startswith(stream.text)
        assert certain.removeprefix(stream.text).strip("\ufffd") == ""
        assert len(certain) - len(stream.text) <= 2  # one started character, or ED A0


def test_characters_split_over_tokens_never_show_as_halves():
    ids = [i for c in "ďábelské 🌶 日本" for i in byte_ids(c.encode())]
    stream = detokenizer(BYTES)
    deltas = [stream.push([i]) for i in ids]
    assert "".join(deltas) == "ďábelské 🌶 日本"
    assert deltas[:2] == ["", "ď"]
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_half_character_before_other_text_reads_as_in_the_whole_decode():
    ids = byte_ids(b"\xf0\x9f a")
    stream = detokenizer(BYTES)
    assert [stream.push([i]) for i in ids] == ["", "", "\ufffd ", "a"]
    assert stream.finish() == ""
    assert stream.text == BYTES.decode(ids) == "\ufffd a"


def test_a_character_cut_off_by_the_end_is_flushed():
    stream = detokenizer(BYTES)
    assert stream.push(byte_ids(b"a\xf0\x9f\x8c")) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.text == BYTES.decode(byte_ids(b"a\xf0\x9f\x8c"))
    assert stream.finish() == stream.push(byte_ids(b"b")) == ""


def test_bytes_that_begin_no_character_are_not_held_back():
    stream = detokenizer(BYTES)
    assert stream.push(byte_ids(b"\x80")) == "\ufffd"
    assert stream.push(byte_ids(b"\xff")) == "\ufffd"


def test_a_character_that_the_prompt_began_belongs_to_the_output():
    prompt = byte_ids("🌶".encode()[:2])
    stream = detokenizer(BYTES, prompt)
    assert [stream.push([i]) for i in byte_ids("🌶".encode()[2:] + b"x")] == ["", "🌶", "x"]
    left_open = detokenizer(BYTES, prompt)
    assert left_open.push(byte_ids(b"x")) == "x"
    assert detokenizer(BYTES, prompt).finish(byte_ids(b"\x8c")) == ""


@pytest.mark.parametrize("pieces", [["▁", "▁leading", "▁x"], ["▁is", "▁the"]])
def test_leading_blanks_of_sentencepiece_stream_as_in_the_whole_decode(pieces):
    backend = metaspace()
    backend.add_tokens(["▁", "▁leading", "▁x", "▁is", "▁the"])
    tokenizer = wrapped(backend)
    ids = [backend.get_vocab()[piece] for piece in pieces]
    for prompt in ([], tokenizer.encode("<s>"), tokenizer.encode("the cat")):
        stream = detokenizer(tokenizer, prompt)
        text = "".join(stream.push([i]) for i in ids) + stream.finish()
        before = tokenizer.decode(prompt)
        assert text == tokenizer.decode(prompt + ids)[len(before) :]
        assert text == backend.decode(prompt + ids)[len(backend.decode(prompt)) :]


def test_a_word_after_a_prompt_keeps_its_blank():
    tokenizer = KINDS["byte_fallback"]
    the = tokenizer.encode("the")
    assert detokenizer(tokenizer, tokenizer.encode("a")).push(the) == " the"
    assert detokenizer(tokenizer, []).push(the) == "the"


def test_special_tokens_are_skipped_or_shown_in_the_middle():
    ids = spell("a<|im_end|>b")
    assert detokenizer(BYTES).push(ids) == "ab"
    assert detokenizer(BYTES, skip_special_tokens=False).push(ids) == "a<|im_end|>b"


def test_a_kept_special_token_has_text_and_the_others_have_none():
    kept = list(BYTES.control_ids(["<|im_end|>", "no such token"]).values())
    ids = spell("a<|im_start|><|im_end|>b")
    assert detokenizer(BYTES, kept_special_ids=kept).push(ids) == "a<|im_end|>b"
    stopping = detokenizer(BYTES, kept_special_ids=kept, stop=("end|>b",))
    assert stopping.push(ids) == "a<|im_"


def test_ids_without_token_have_no_text():
    assert detokenizer(BYTES).push([*spell("a"), BYTES.vocab_size, 10**9, *spell("b")]) == "ab"


def test_no_part_of_a_stop_string_leaks():
    stream = detokenizer(BYTES, stop=["DEFGHIJ"])
    assert [stream.push(spell(t)) for t in ("DEF", "G", "HI", "J", "more")] == [""] * 5
    assert stream.stopped_by == "DEFGHIJ"
    assert stream.text == stream.finish() == ""


def test_text_held_for_a_stop_string_is_released_once_it_cannot_come():
    stream = detokenizer(BYTES, stop=["DEFGHIJ"])
    assert [stream.push(spell(t)) for t in ("DEF", "G", "X")] == ["", "", "DEFGX"]
    assert stream.stopped_by is None


def test_only_the_longest_end_that_may_begin_a_stop_string_is_held():
    stream = detokenizer(BYTES, stop=["abcd", "cab"])
    assert stream.push(spell("xxabab")) == "xxab"
    assert stream.push(spell("c")) == ""
    assert stream.push(spell("x")) == "abcx"


def test_held_text_is_released_at_the_end():
    stream = detokenizer(BYTES, stop=["zzzz"])
    assert stream.push(spell("pizzz")) == "pi"
    assert stream.finish(spell(" z")) == "zzz z"
    assert stream.text == "pizzz z"


def test_a_stop_string_inside_one_token_cuts_it():
    tokenizer = wrapped(byte_level(special("unused"), "hello world"))
    ids = tokenizer.encode("hello world")
    assert len(ids) == 1
    stream = detokenizer(tokenizer, stop=["o w"])
    assert stream.push(ids) == "hell"
    assert stream.stopped_by == "o w"


def test_a_stop_string_is_shown_if_asked_for():
    stream = detokenizer(BYTES, stop=["STOP"], include_stop_str_in_output=True)
    assert [stream.push(spell(t)) for t in ("a S", "TO", "P!", "b")] == ["a ", "", "STOP", ""]


def test_a_stop_string_may_begin_in_the_bytes_of_a_cut_character():
    stream = detokenizer(BYTES, stop=["日本"])
    assert [stream.push([i]) for i in byte_ids("a日本".encode())] == ["a"] + [""] * 6
    assert stream.stopped_by == "日本"


def test_the_stop_string_that_is_complete_first_wins_however_the_text_comes():
    stops = ["ab", "abc", "bca"]
    for split in (["abca"], ["a", "b", "c", "a"], ["ab", "ca"]):
        stream = detokenizer(BYTES, stop=stops)
        assert "".join(stream.push(spell(part)) for part in split) == ""
        assert stream.stopped_by == "ab"
    assert find_stop("xbca", 0, stops) == StopMatch(1, 4, "bca")


def test_a_stop_string_inside_a_longer_one_wins_because_it_is_complete_first():
    assert find_stop("abcde", 0, ["abcde", "bc"]) == StopMatch(1, 3, "bc")
    assert detokenizer(BYTES, stop=["abcde", "bc"]).push(spell("abcde")) == "a"


def test_of_stop_strings_that_end_together_the_longest_wins():
    assert find_stop("xyz", 0, ["z", "yz"]) == StopMatch(1, 3, "yz")


def test_find_stop_ignores_what_ended_before():
    assert find_stop("ab..ab", 2, ["ab"]) == StopMatch(4, 6, "ab")
    assert find_stop("ab..", 2, ["ab"]) is None
    assert find_stop("ab..", 1, ["ab"]) == StopMatch(0, 2, "ab")
    assert find_stop("ab", 0, []) is None


def test_stop_strings_count_from_min_tokens_on():
    x = spell("x")
    for min_tokens, expected in ((3, "xx"), (4, "xxx")):
        stream = detokenizer(BYTES, stop=["x"], min_tokens=min_tokens)
        assert stream.push(x * 9) == expected
        assert stream.num_tokens == min_tokens


def test_a_stop_string_begun_before_min_tokens_may_end_after():
    stream = detokenizer(BYTES, stop=["abc"], min_tokens=3)
    assert [stream.push(byte_ids(b)) for b in (b"a", b"b", b"c")] == ["", "", ""]
    assert stream.stopped_by == "abc"


def test_tokens_after_the_stop_string_are_not_counted():
    stream = detokenizer(BYTES, stop=["b"])
    assert stream.push(byte_ids(b"abcd")) == "a"
    assert stream.num_tokens == 2


def test_a_long_stream_equals_its_decode():
    chooser = random.Random(5)
    ids = [chooser.randrange(BYTES.vocab_size) for _ in range(5000)]
    stream = detokenizer(BYTES, stop=["never in the text"])
    deltas = [stream.push([i]) for i in ids]
    assert "".join([*deltas, stream.finish()]) == BYTES.decode(ids)
