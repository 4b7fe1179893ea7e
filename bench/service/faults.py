"""Steps that fail on purpose: a runner's two calls, with failures at random places.

Knows no model and no server. The random numbers are seeded, so a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from jaxinfer.errors import PoolLost


class InjectedFailure(RuntimeError):
    """A step that was made to fail."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Shares of all steps; the rest are left alone."""

    at_dispatch: float = 0.0  # before anything ran
    at_collect: float = 0.0  # the step ran, and what it gave is lost
    pool_lost: float = 0.0  # at collect, with all keys and values
    seed: int = 0


class Faults:
    """Puts failures around a runner's `dispatch` and `collect`."""

    def __init__(self, rates: FaultRates):
        self._rates, self._random = rates, Random(rates.seed)

    def around_dispatch(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any) -> Any:
            if self._random.random() < self._rates.at_dispatch:
                raise InjectedFailure("this step was made to fail when it was dispatched")
            return dispatch(*args)

        return faulty

    def around_collect(self, collect: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any) -> Any:
            result = collect(*args)
            draw = self._random.random()
            if draw < self._rates.pool_lost:
                raise PoolLost("the pool was made to be lost")
            if draw < self._rates.pool_lost + self._rates.at_collect:
                raise InjectedFailure("this step was made to fail when it was read")
            return result

        return faulty
