"""How far two outputs are from each other, by their tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where they differ, or where one has ended; None: they are the same."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def edit_distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Tokens to insert, delete or replace (Levenshtein), by those of the longer one: 0..1.

    Takes len(one) * len(other) steps.
    """
    costs = list(range(len(other) + 1))  # from one[:row] to other[:column]
    for row, a in enumerate(one, 1):
        diagonal, costs[0] = costs[0], row
        for column, b in enumerate(other, 1):
            least = min(diagonal + (a != b), costs[column] + 1, costs[column - 1] + 1)
            diagonal, costs[column] = costs[column], least
    return costs[-1] / max(len(one), len(other), 1)
