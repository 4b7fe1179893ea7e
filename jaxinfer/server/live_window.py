"""What the steps of the last seconds amount to: speeds, and the share of padding.

Pure: the clock is an argument. One thread adds; another may read meanwhile and then sees at worst
a step less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from jaxinfer.stats import StepStats

WINDOW_S = 60  # of which padding is told
SPEED_S = 5  # over which speeds are taken


class LiveWindow:
    """Sums of steps by second, of the last WINDOW_S seconds.

    Args:
        clock: seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ring = [[-1, 0, 0, 0] for _ in range(WINDOW_S + 1)]  # second, then the sums

    def add(self, step: StepStats) -> None:
        second = int(self._clock())
        slot = self._ring[second % len(self._ring)]
        if slot[0] != second:
            slot[:] = second, 0, 0, 0
        slot[1] += step.num_tokens
        slot[2] += step.num_padded_tokens
        slot[3] += step.num_sampled

    @property
    def padding_waste(self) -> float:
        """Share of the tokens of the last WINDOW_S seconds that was padding; 0 if there were
        none.
        """
        computed, padded, _ = self._sums(WINDOW_S, 0)
        return 1.0 - computed / padded if padded else 0.0

    @property
    def generation_speed(self) -> float:
        """Tokens sampled per second, over the last SPEED_S whole seconds."""
        return self._sums(SPEED_S, 1)[2] / SPEED_S

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens computed per second, over the last SPEED_S whole seconds.

        Exact but for the one token by which a prompt's last chunk is also sampled.
        """
        computed, _, sampled = self._sums(SPEED_S, 1)
        return max(computed - sampled, 0) / SPEED_S

    def _sums(self, seconds: int, skipped: int) -> tuple[int, int, int]:
        """Of `seconds` seconds, but for the newest `skipped` ones."""
        newest = int(self._clock()) - skipped
        found = list(self._between(newest - seconds, newest))
        return sum(s[1] for s in found), sum(s[2] for s in found), sum(s[3] for s in found)

    def _between(self, after: int, last: int) -> Iterator[list[int]]:
        return (slot for slot in self._ring if after < slot[0] <= last)
