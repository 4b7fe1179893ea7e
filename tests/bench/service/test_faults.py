from __future__ import annotations

from typing import Any

import pytest

from bench.service.faults import FaultRates, Faults, InjectedFailure
from jaxinfer.errors import PoolLost


def outcomes(call: Any, number: int = 4000) -> list[str]:
    """What each call gave: its answer, or the name of what it raised."""
    found: list[str] = []
    for i in range(number):
        try:
            found.append(str(call(i)))
        except (InjectedFailure, PoolLost) as error:
            found.append(type(error).__name__)
    return found


def test_no_rate_no_fault():
    faults = Faults(FaultRates())
    assert outcomes(faults.around_dispatch(str)) == [str(i) for i in range(4000)]
    assert outcomes(faults.around_collect(str)) == [str(i) for i in range(4000)]


def test_faults_come_as_often_as_asked_and_the_same_ones_again():
    rates = FaultRates(at_dispatch=0.25, at_collect=0.2, pool_lost=0.1, seed=3)
    first, again = Faults(rates), Faults(rates)
    dispatched = outcomes(first.around_dispatch(str))
    collected = outcomes(first.around_collect(str))
    assert dispatched.count("InjectedFailure") == pytest.approx(1000, rel=0.1)
    assert collected.count("InjectedFailure") == pytest.approx(800, rel=0.1)
    assert collected.count("PoolLost") == pytest.approx(400, rel=0.15)
    assert outcomes(again.around_dispatch(str)) == dispatched


def test_a_step_that_fails_when_it_is_read_has_run():
    ran: list[int] = []
    with pytest.raises(InjectedFailure):
        Faults(FaultRates(at_collect=1.0)).around_collect(ran.append)(1)
    assert ran == [1]


def test_a_step_that_fails_when_it_is_dispatched_has_not():
    ran: list[int] = []
    with pytest.raises(InjectedFailure):
        Faults(FaultRates(at_dispatch=1.0)).around_dispatch(ran.append)(1)
    assert not ran
