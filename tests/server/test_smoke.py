"""What a new version must say before it gets a call."""

from __future__ import annotations

from jaxinfer.server.smoke import _difference


def test_a_difference_far_into_a_text_is_shown_where_it_is():
    expected, found = "a" * 100 + "b" * 100, "a" * 100 + "c" * 100
    told = _difference(1, 2, expected, found)
    assert told == (
        f"recorded output 1 of 2: expected {'a' * 40 + 'b' * 40!r}, found "
        f"{'a' * 40 + 'c' * 40!r} from character 60 on"
    )
    assert _difference(1, 1, "ab", "abc").endswith("expected 'ab', found 'abc'")
