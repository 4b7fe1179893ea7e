"""Distances of token lists, worked out by hand."""

from __future__ import annotations

import pytest

from jaxinfer.canary.token_distance import edit_distance, first_difference


@pytest.mark.parametrize(
    ("one", "other", "place", "distance"),
    [
        ([], [], None, 0.0),
        ([1, 2, 3], [1, 2, 3], None, 0.0),
        ([1, 2, 3], [1, 2], 2, 1 / 3),
        ([], [7], 0, 1.0),
        ([1, 2, 3, 4], [1, 9, 3, 4], 1, 1 / 4),
        ([1, 2, 3, 4], [2, 3, 4], 0, 1 / 4),
        ([1, 2, 3, 4], [5, 6, 7, 8], 0, 1.0),
        ([*b"kitten"], [*b"sitting"], 0, 3 / 7),
    ],
)
def test_the_first_difference_and_the_edits(
    one: list[int], other: list[int], place: int | None, distance: float
):
    for a, b in ((one, other), (other, one)):
        assert first_difference(a, b) == place
        assert edit_distance(a, b) == pytest.approx(distance)
