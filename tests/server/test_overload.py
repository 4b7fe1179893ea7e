"""What the admission makes of 1, 4 and 10 times the load, in minutes of simulated time.

The arrivals are of a fixed seed, so each number is always the same.
"""

from __future__ import annotations

import random

import pytest

from jaxinfer.server.service_rate import MAX_RETRY_S, MIN_RETRY_S
from tests.server.overload_model import Model, Visitor, crowd, outcome

SECONDS = 60.0
CAPACITY = Model().capacity(32)  # requests of 32 tokens per second, about 6
TIMEOUT_S = 4.0  # three times what a request takes by itself


def mixed(chance: random.Random) -> str:
    drawn = chance.random()
    return "interactive" if drawn < 0.05 else "normal" if drawn < 0.6 else "batch"


def varied(chance: random.Random) -> tuple[int, int]:
    number = chance.randint(16, 48)
    return number, number


def short_of_what_they_ask_for(chance: random.Random) -> tuple[int, int]:
    return 1000, chance.randint(16, 48)


@pytest.fixture(scope="module")
def overloads() -> dict[int, tuple[Model, list[Visitor]]]:
    """Load -> what came of it."""
    found: dict[int, tuple[Model, list[Visitor]]] = {}
    for load in (1, 4, 10):
        model, visitors = Model(), crowd(load * CAPACITY, SECONDS, load, timeout_s=TIMEOUT_S)
        model.run(visitors)
        found[load] = model, visitors
    return found


@pytest.mark.parametrize("load", [1, 4, 10])
def test_goodput_stays_at_its_peak_and_one_in_a_hundred_is_late(
    overloads: dict[int, tuple[Model, list[Visitor]]], load: int
):
    model, visitors = overloads[load]
    found = outcome(visitors, 0.0, SECONDS)
    peak = max(outcome(v, 0.0, SECONDS).goodput for _, v in overloads.values())
    assert peak >= 0.95 * CAPACITY
    assert found.num_late <= 0.01 * found.num_admitted
    if load > 1:
        assert found.goodput >= 0.95 * peak
    else:
        assert found.goodput >= 0.9 * len(visitors) / SECONDS
    assert model.admission.num_open == 0
    assert all(model.admission.open_tokens_of(name) == 0 for name in model.classes.names)


@pytest.mark.parametrize("load", [4, 10])
def test_the_time_to_come_back_grows_with_those_who_will(
    overloads: dict[int, tuple[Model, list[Visitor]]], load: int
):
    told = [v.retry_after_s for v in overloads[load][1] if v.retry_after_s is not None]
    assert len(told) > (load - 2) * CAPACITY * SECONDS
    assert all(MIN_RETRY_S <= seconds <= MAX_RETRY_S for seconds in told)
    assert told[0] < 2
    assert min(told[-100:]) > 30


@pytest.mark.parametrize("tokens", [varied, short_of_what_they_ask_for])
def test_lengths_that_vary_and_lengths_that_nobody_knows_change_nothing(tokens):
    model = Model()
    visitors = crowd(4 * CAPACITY, SECONDS, 5, timeout_s=8.0, tokens=tokens)
    model.run(visitors)
    found = outcome(visitors, 0.0, SECONDS)
    assert found.num_late <= 0.01 * found.num_admitted
    assert found.goodput >= 0.95 * CAPACITY


def test_the_best_class_is_served_at_once_and_the_worst_is_refused_rather_than_late():
    model = Model()
    visitors = crowd(10 * CAPACITY, SECONDS, 7, timeout_s=TIMEOUT_S, name=mixed)
    model.run(visitors)
    best = [v for v in visitors if v.name == "interactive"]
    assert len(best) > 100
    assert all(v.permit is not None and not v.is_late for v in best)
    firsts = sorted(v.first_s - v.arrival_s for v in best if v.first_s is not None)
    assert firsts[len(firsts) // 2] < 0.1  # two steps
    found = outcome(visitors, 0.0, SECONDS)
    assert found.goodput >= 0.9 * CAPACITY
    # Those are of the first second, in which nothing had been measured.
    assert all(v.arrival_s < 1.0 for v in visitors if v.is_late and v.name == "batch")
    assert found.num_late <= 10


def test_after_idle_minutes_the_next_burst_is_served_as_the_first():
    model = Model()
    bursts = [
        crowd(10 * CAPACITY, 20.0, seed, timeout_s=TIMEOUT_S, first_s=at)
        for seed, at in ((1, 0.0), (2, 300.0))
    ]
    model.run([v for burst in bursts for v in burst])
    first, second = outcome(bursts[0], 0.0, 20.0), outcome(bursts[1], 300.0, 320.0)
    assert second.goodput >= 0.95 * first.goodput
    assert first.num_late + second.num_late <= 2


def test_few_requests_with_little_time_are_served_one_after_the_other_for_ever():
    """A time limit that a full server would miss must not keep an empty one from trying."""
    model = Model()
    model.run(crowd(4 * CAPACITY, 20.0, 3, timeout_s=1.5))
    alone = [Visitor(10.0 * number, "normal", 32, 32, timeout_s=1.1) for number in range(30)]
    model.run(alone)
    assert all(v.permit is not None and not v.is_late for v in alone)


def test_a_request_that_can_never_be_in_time_is_refused_when_others_are_there():
    model = Model()
    hopeless = [Visitor(5.0 + 0.1 * i, "normal", 5000, 5000, TIMEOUT_S) for i in range(100)]
    others = crowd(0.5 * CAPACITY, 20.0, 3, timeout_s=TIMEOUT_S)
    model.run([*others, *hopeless])
    assert sum(v.permit is not None for v in hopeless) <= 2
    assert all(v.permit is not None and not v.is_late for v in others)


def test_after_a_stall_nearly_all_are_served_at_once_and_everybody_after_half_a_minute():
    model = Model()
    model.run(crowd(0.5 * CAPACITY, 10.0, 3, timeout_s=TIMEOUT_S))
    stalled = crowd(0.5 * CAPACITY, 40.0, 4, timeout_s=TIMEOUT_S)
    usual_s, model.fixed_s = model.fixed_s, 0.5
    model.run(stalled[:60])
    model.fixed_s = usual_s
    later = crowd(0.5 * CAPACITY, 60.0, 5, timeout_s=TIMEOUT_S)
    model.run(later)
    refused = [v.arrival_s for v in later if v.permit is None]
    assert len(refused) < 0.05 * len(later)
    assert max(refused, default=0.0) < 30.0
    assert not any(v.is_late for v in later)
