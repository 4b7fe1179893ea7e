"""What the cap may drop is held back, and nothing else."""

from __future__ import annotations

from jaxinfer.text_cap import WINDOW_TOKENS, TextCap


def streamed(pieces: str, cap: int) -> tuple[list[str], str]:
    """One token per piece, separated by |; the last one is the cap's."""
    reader = TextCap(cap)
    parts = pieces.split("|")
    assert len(parts) == cap
    shown = [reader.push(text, number) for number, text in enumerate(parts, 1)]
    rest, at = reader.cut()
    return [*shown, rest], at


def test_text_behind_the_last_sentence_is_held_and_dropped():
    shown, at = streamed("One|. Two|. Three| four|. Five| six| seven| eight", 8)
    assert shown[:4] == ["One", ". Two", ". Three", " four"]
    assert shown[4:] == [".", "", "", "", ""]
    assert at == "sentence"


def test_held_text_comes_with_the_next_end():
    shown, _ = streamed("a|b|c|d|. Go| on|. Yes| no", 8)
    assert shown == ["a", "b", "c", "d", ".", "", " Go on.", "", ""]


def test_without_an_end_in_the_window_nothing_is_held():
    shown, at = streamed("One. |Two| x| three| four| five|-|six", 8)
    assert "".join(shown) == "One. Two x three four five-six"
    assert shown[5] == " five"
    assert at == "token"


def test_an_end_right_where_the_window_begins_counts():
    shown, at = streamed("So|. Yes| it| is.| And|then| no| end", 8)
    assert (shown[4:], at) == (["", "", "", "", ""], "sentence")


def test_what_may_become_an_end_is_held_until_it_is_known():
    shown, _ = streamed("a|b|c|d|3.|5 |m. |then", 8)
    assert shown[4:] == ["3.", "5", " m.", " then", ""]


def test_a_code_block_that_the_cap_cuts_ends_with_a_whole_line():
    shown, at = streamed("See|\n```py\n|x = 1.|\n|y| = 2|\n|z = ", 8)
    assert "".join(shown) == "See\n```py\nx = 1.\ny = 2"
    assert at == "line"


def test_a_sentence_before_a_code_block_beats_the_lines_inside():
    shown, at = streamed("a|b|c|d|See. |\n```\n|x = 1\n|y", 8)
    assert ("".join(shown), at) == ("abcdSee.", "sentence")


def test_text_that_ends_in_another_way_is_released():
    reader = TextCap(4)
    assert [reader.push(text, n) for n, text in enumerate(("a", "b", ". C", "d"), 1)][2] == "."
    assert reader.release() == " Cd"
    assert reader.release() == ""


def test_the_window_is_64_tokens_or_half_of_a_small_cap():
    assert WINDOW_TOKENS == 64
    for cap, first_held in ((1000, 937), (128, 65), (100, 51), (3, 3), (2, 2)):
        reader = TextCap(cap)
        shown = [reader.push("A. B", number) for number in range(1, cap + 1)]
        assert shown.index("A.") == first_held - 1
    assert TextCap(1).push("A. B", 1) == "A. B"
