"""The stages of a canary: which share of the traffic, for how long.

No imports of ours but the errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.errors import InvalidRequest

MAX_STAGES = 100


@dataclass(frozen=True, slots=True)
class Stage:
    """It ends when both have come: the time, and the requests.

    Raises: InvalidRequest for values that cannot work.
    """

    share: float  # of the keys, 0..1
    hold_s: float = 300.0
    min_requests: int = 0  # of the canary, ended since the stage began

    def __post_init__(self):
        check_share("share", self.share)
        if not (math.isfinite(self.hold_s) and self.hold_s >= 0.0):
            raise InvalidRequest(
                f"hold_s is a number of seconds from 0, not {self.hold_s!r}", param="hold_s"
            )
        if self.min_requests < 0:
            raise InvalidRequest(
                f"min_requests is a count from 0, not {self.min_requests!r}", param="min_requests"
            )


def check_share(name: str, share: float) -> None:
    """Raises: InvalidRequest for a share outside 0..1."""
    if not 0.0 <= share <= 1.0:  # false for NaN, too
        raise InvalidRequest(
            f"{name} is a part of the traffic within 0..1, not {share!r}; 0.1 is 10 %", param=name
        )


def check_stages(stages: Sequence[Stage]) -> None:
    """Raises: InvalidRequest if there are too many, or one is no larger than that before it."""
    if len(stages) > MAX_STAGES:
        raise InvalidRequest(
            f"a schedule has at most {MAX_STAGES} stages, not {len(stages)}", param="stages"
        )
    shares = [stage.share for stage in stages]
    for before, after in itertools.pairwise(shares):
        if after <= before:
            raise InvalidRequest(
                f"each stage has a larger share than that before it, but {after:g} follows "
                f"{before:g}",
                param="stages",
            )


DEFAULT_STAGES = (  # then promoted
    Stage(0.01, hold_s=300.0, min_requests=50),
    Stage(0.05, hold_s=300.0, min_requests=100),
    Stage(0.25, hold_s=300.0, min_requests=200),
    Stage(0.50, hold_s=300.0, min_requests=200),
)
