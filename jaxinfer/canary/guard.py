"""What a canary may not do, and how often a good one may be rolled back by mistake.

No imports of ours but the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.errors import InvalidRequest

MAX_NLL_INCREASE = 1.0  # nats per token that can be asked for


@dataclass(frozen=True, slots=True)
class Guard:
    """None turns a signal off.

    A rank is a chance: that of two answers, one of each version, the canary's has more. 0.5 says
    that they do not differ.

    Raises: InvalidRequest for values that cannot work.
    """

    false_alarm_rate: float = 0.01  # of a rollout: a canary that does none of this is rolled back
    max_slowdown: float | None = 0.05  # of a step; 0.05: up to 5 % slower is tolerated
    max_kl: float | None = None  # mean nats per token, against the stable version
    max_nll_increase: float | None = 0.02  # mean nats per token, over the stable version
    max_length_rank: float | None = 0.65  # of output tokens; either way, so 0.35..0.65
    max_repetition_rank: float | None = 0.6  # of repetition
    max_cut_increase: float | None = 0.1  # of the share of answers that end by `length`

    def __post_init__(self):
        self._check("false_alarm_rate", 1e-9, 0.5)
        self._check("max_slowdown", 0.0, 100.0)
        self._check("max_kl", 1e-6, 100.0)
        self._check("max_nll_increase", 0.0, MAX_NLL_INCREASE)
        self._check("max_length_rank", 0.5, 0.95)
        self._check("max_repetition_rank", 0.5, 0.95)
        self._check("max_cut_increase", 0.0, 0.9)

    def _check(self, name: str, least: float, most: float) -> None:
        value: object = getattr(self, name)
        if value is None and name != "false_alarm_rate":
            return
        if not isinstance(value, int | float) or not least <= value <= most:  # NaN is refused, too
            raise InvalidRequest(f"{name} is within {least:g}..{most:g}, not {value!r}", param=name)
