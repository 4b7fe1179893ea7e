"""Work in the background of a server: it rests as long as it works.

A low priority of the thread would do worse. A thread that holds Python's lock and gets no core
holds up every other one; and on a machine whose cores are all busy it would not come to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_REST_S = 0.25


class Pace:
    """Of one work, from its creation on. `clock`: seconds."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._clock, self._sleep = clock, sleep
        self._rested_s = clock()

    def rest(self) -> None:
        """To be called after each small piece of work."""
        self._sleep(min(self._clock() - self._rested_s, MAX_REST_S))
        self._rested_s = self._clock()
