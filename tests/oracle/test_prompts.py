"""The prompts' lengths meet the borders, and cutting is exact or refused. One byte is one token."""

import pytest

from tests.oracle.prompts import PROMPTS, SCORED_TEXTS, Prompt, chat, fit
from tests.oracle.strings import STRINGS


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def test_twenty_prompts_meet_the_borders_of_pages_and_tiles():
    lengths = {prompt.num_tokens for prompt in PROMPTS}
    assert len(PROMPTS) == len(lengths) == 20
    assert {5, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700} <= lengths
    assert min(lengths) == 5
    assert max(lengths) == 700


def test_names_and_strings_are_unique():
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)
    assert len(set(STRINGS)) == len(STRINGS) >= 60
    assert len(set(SCORED_TEXTS)) == len(SCORED_TEXTS) == 6


def test_a_long_text_is_cut_to_the_asked_number_of_tokens():
    assert fit(Prompt("p", 4, "abcdef"), encode, decode) == ("abcd", [97, 98, 99, 100])


def test_only_the_body_is_cut():
    text, token_ids = fit(Prompt("p", 5, "abcdef", head="<", tail="!>"), encode, decode)
    assert text == "<ab!>"
    assert len(token_ids) == 5


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(
        ValueError, match="'p' should have 9 tokens, of which 9 come from its body of 6"
    ):
        fit(Prompt("p", 9, "abcdef"), encode, decode)


def test_a_cut_inside_a_character_is_refused():
    with pytest.raises(ValueError, match="choose another length or text"):
        fit(Prompt("p", 2, "aé"), encode, decode)


def test_a_cut_that_keeps_the_number_but_not_the_tokens_is_refused():
    def merging(text: str) -> list[int]:
        return [0, *encode(text)[1:]] if len(text) == 2 else encode(text)

    with pytest.raises(ValueError, match="not the same ones"):
        fit(Prompt("p", 2, "abc"), merging, decode)


def test_a_chat_prompt_is_written_in_chatml_with_its_last_turn_open_to_cutting():
    prompt = chat("c", 99, "Hi", "Hello", "Bye", system="Be brief.")
    assert prompt.head + prompt.body + prompt.tail == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt.body == "Bye"
