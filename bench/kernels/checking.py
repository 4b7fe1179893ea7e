"""Whether a kernel's numbers are right, and a row's bits its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.kernels.case import Check


@dataclass(frozen=True, slots=True)
class Checked:
    name: str
    relative_error: float  # the largest error, by the largest number
    bound: float
    num_sizes: int  # numbers of rows that were tried
    differing: tuple[int, ...]  # those at which a row had other bits

    @property
    def is_good(self) -> bool:
        return self.relative_error <= self.bound and not self.differing  # NaN is not good


def check(subject: Check, sizes: Sequence[int]) -> Checked:
    """Args: sizes: numbers of rows; the last one is of all rows."""
    whole = subject.rows(sizes[-1])
    expected = subject.expected()
    error = np.abs(whole.astype(np.float64) - expected).max() / np.abs(expected).max()
    differing = tuple(
        number
        for number in sizes
        if subject.rows(number)[:number].tobytes() != whole[:number].tobytes()
    )
    return Checked(subject.name, float(error), subject.bound, len(sizes), differing)
