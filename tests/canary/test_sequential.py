"""Betting: numbers by hand, and the chance of a false alarm whenever one looks."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.canary.sequential import FRACTIONS, Bets

MEAN_FRACTION = sum(FRACTIONS) / len(FRACTIONS)  # 0.382


def e_value_of(m0: float, observations: tuple[float, ...] | list[float]) -> float:
    bets = Bets(m0)
    for x in observations:
        bets.note(x)
    return bets.e_value


def ever_reaches(threshold: float, m0: float, chance: float, num: int, random: Random) -> bool:
    bets = Bets(m0)
    for _ in range(num):
        bets.note(float(random.random() < chance))
        if bets.e_value >= threshold:
            return True
    return False


def test_nothing_seen_is_worth_one():
    assert Bets(0.3).e_value == 1.0


def test_the_first_observation_by_hand():
    # Half of the money is bet: at m0 = 1/2 the bets are 2 f, and x = 1 gives 1 + f.
    assert e_value_of(0.5, [1.0]) == pytest.approx(0.5 * (1 + MEAN_FRACTION) + 0.5)
    assert e_value_of(0.5, [0.0]) == pytest.approx(0.5 * (1 - MEAN_FRACTION) + 0.5)


def test_the_second_observation_by_hand():
    # A sixth of the money comes in, a third waits.
    both = [(0.5 * (1 + f) + 1 / 6) * (1 + f) for f in FRACTIONS]
    assert e_value_of(0.5, [1.0, 1.0]) == pytest.approx(sum(both) / len(both) + 1 / 3)


@pytest.mark.parametrize("m0", [0.1, 0.5, 0.8])
def test_under_the_null_the_mean_over_all_that_can_come_is_one(m0: float):
    mean = math.fsum(
        math.prod(m0 if x else 1 - m0 for x in xs) * e_value_of(m0, xs)
        for xs in itertools.product((0.0, 1.0), repeat=6)
    )
    assert mean == pytest.approx(1.0)


@given(
    m0=st.floats(0.01, 0.99),
    observations=st.lists(st.floats(allow_nan=False), max_size=50),
)
def test_the_value_is_a_positive_number_whatever_is_observed(m0: float, observations: list[float]):
    assert 0.0 < e_value_of(m0, observations) < math.inf


def test_what_lies_outside_counts_as_the_nearer_end():
    assert e_value_of(0.5, [7.0, -7.0]) == e_value_of(0.5, [1.0, 0.0])


def test_endless_evidence_is_large_and_no_error():
    assert e_value_of(0.5, [1.0] * 5000) > 1e300


def test_what_turns_bad_after_a_good_while_is_found():
    bets = Bets(0.5)
    for _ in range(5000):
        bets.note(0.0)
    assert bets.e_value < 1e-3
    for _ in range(40):
        bets.note(1.0)
    assert bets.e_value > 1000


@pytest.mark.parametrize(("m0", "alpha", "num_runs", "num"), [(0.5, 0.1, 300, 150)])
def test_false_alarms_are_no_more_than_stated(m0: float, alpha: float, num_runs: int, num: int):
    random = Random(7)
    alarms = sum(ever_reaches(1 / alpha, m0, m0, num, random) for _ in range(num_runs))
    assert alarms <= alpha * num_runs  # far from it by the seed, as the bound is not tight


@pytest.mark.slow
@pytest.mark.parametrize("m0", [0.06, 0.12, 0.5, 0.65])
def test_false_alarms_are_no_more_than_stated_in_long_runs(m0: float):
    random, alpha, num_runs = Random(7), 0.05, 1000
    alarms = sum(ever_reaches(1 / alpha, m0, m0, 2000, random) for _ in range(num_runs))
    assert alarms <= alpha * num_runs + 3 * math.sqrt(alpha * (1 - alpha) * num_runs)


@pytest.mark.parametrize("m0", [0.0, 1.0, -1.0, math.nan])
def test_a_null_without_room_is_refused(m0: float):
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        Bets(m0)
