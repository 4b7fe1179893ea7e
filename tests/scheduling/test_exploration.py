"""Every state of a small scheduler keeps the laws, and undisturbed it comes to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduling.exploration import (
    DISTURBANCES,
    PAUSES,
    Edge,
    Exploration,
    Explorer,
    LawBroken,
    Plan,
    Runs,
    State,
    runs_to_the_end,
)
from tests.scheduling.plans import CLASSES, LONG, SETUP, SHORT, TIGHT, same_digest

FOUR = replace(SETUP, max_num_batched_tokens=4)


def explored(plan: Plan, *, at_least: int) -> Exploration:
    """All states; it is no proof if they are few, or nothing was preempted, evicted or merged."""
    found = Explorer(plan).run()
    assert found.is_closed
    assert found.num_preempting > 0
    assert found.num_evicting > 0
    assert found.num_compared > 0
    num_states = len(found.states)
    assert num_states >= at_least
    return found


def longest_runs(found: Exploration) -> list[Runs]:
    return [runs_to_the_end(found, is_deep=is_deep) for is_deep in (False, True)]


def test_every_order_of_events_keeps_the_laws_and_every_request_ends():
    found = explored(Plan(TIGHT, SHORT, DISTURBANCES - {"new version"}), at_least=10_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 12
        assert longest.num_preemptions <= 2


def test_with_three_classes_on_two_seats():
    found = explored(Plan(TIGHT, CLASSES, frozenset({"expire"})), at_least=1_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 20
        assert longest.num_preemptions <= 3


def test_with_two_versions_of_the_weights_too():
    found = explored(Plan(FOUR, SHORT, frozenset({"new version"})), at_least=2_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 16
        assert longest.num_preemptions <= 2


def test_with_readers_that_fall_behind_and_catch_up_too():
    found = explored(Plan(replace(FOUR, num_pages=4), SHORT[:2], PAUSES), at_least=1_500)
    for longest in longest_runs(found):
        assert longest.num_events <= 13
        assert longest.num_preemptions <= 1


def a_circle(*, is_open: bool) -> Exploration:
    """States 0 -> 1 -> 2, and back to 0 if it is not open."""
    states = {key: State(key - 1 if key else None, (str(key),), is_busy=True) for key in range(3)}
    for key, state in states.items():
        state.following[("schedule",)] = Edge((key + 1) % 3, num_preempted=1)
    states[2].is_busy = not is_open
    return Exploration(states)


def test_a_run_that_comes_to_its_end_is_counted():
    assert runs_to_the_end(a_circle(is_open=True), is_deep=True) == Runs(2, 2)


def test_a_run_that_never_ends_is_found():
    with pytest.raises(LawBroken, match="every run comes to its end"):
        runs_to_the_end(a_circle(is_open=False), is_deep=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_three_seats():
    found = explored(Plan(FOUR, SHORT, DISTURBANCES - {"new version"}), at_least=12_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 12
        assert longest.num_preemptions <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_where_all_digests_collide():
    explored(Plan(replace(FOUR, digest=same_digest), SHORT, DISTURBANCES), at_least=20_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_pauses_the_first_states_of_three_requests_and_all_events_keep_the_laws():
    explorer = Explorer(Plan(FOUR, SHORT, DISTURBANCES | PAUSES))
    assert len(explorer.run(max_states=100_000).states) >= 100_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_longer_requests_with_all_events_at_once():
    found = explored(Plan(SETUP, LONG, DISTURBANCES), at_least=80_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 26
        assert longest.num_preemptions <= 2
