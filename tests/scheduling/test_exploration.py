"""Every state of a small scheduler keeps the laws, and undisturbed it comes to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduling.exploration import (
    DISTURBANCES,
    PAUSES,
    SHARES,
    Edge,
    Exploration,
    Explorer,
    LawBroken,
    Plan,
    Runs,
    State,
    check_no_circle,
    runs_to_the_end,
)
from tests.scheduling.plans import (
    CANARY,
    CLASSES,
    LONG,
    LONG_ANSWERS,
    SETUP,
    SHORT,
    TIGHT,
    same_digest,
)

FOUR = replace(SETUP, max_num_batched_tokens=4)
FAILURES = frozenset({"fail dispatch", "fail read", "lose pool"})


def explored(plan: Plan, *, at_least: int) -> Exploration:
    """All states, none of which comes again unless readers pause; it is no proof if they are few,
    or nothing was preempted, evicted or merged.
    """
    found = Explorer(plan).run()
    assert found.is_closed
    assert found.num_preempting > 0
    assert found.num_evicting > 0
    assert found.num_compared > 0
    num_states = len(found.states)
    assert num_states >= at_least
    if not plan.names & PAUSES:
        check_no_circle(found)
    return found


def longest_runs(found: Exploration) -> list[Runs]:
    return [runs_to_the_end(found, is_deep=is_deep) for is_deep in (False, True)]


def test_every_order_of_events_keeps_the_laws_and_every_request_ends():
    names = DISTURBANCES - FAILURES - {"new version"}
    found = explored(Plan(TIGHT, SHORT, names), at_least=5_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 12
        assert longest.num_preemptions <= 2


def test_with_three_classes_on_two_seats():
    found = explored(Plan(TIGHT, CLASSES, frozenset({"expire"})), at_least=1_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 20
        assert longest.num_preemptions <= 3


def test_whatever_fails_begins_again_and_ends():
    """Alone on its last try, and never for ever: no state comes again, whatever fails."""
    found = explored(Plan(FOUR, SHORT, FAILURES - {"lose pool"}), at_least=4_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 13
        assert longest.num_preemptions <= 1


def test_with_two_versions_of_the_weights_too():
    found = explored(Plan(FOUR, SHORT, frozenset({"new version"})), at_least=2_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 16
        assert longest.num_preemptions <= 2


def test_with_a_canary_of_one_percent_until_shares_are_equal_again():
    setup = replace(CANARY, num_pages=5, max_num_batched_tokens=4)
    found = explored(Plan(setup, LONG_ANSWERS, SHARES), at_least=1_500)
    for longest in longest_runs(found):
        assert longest.num_events <= 30
        assert longest.num_preemptions <= 1


def test_with_readers_that_fall_behind_and_catch_up_too():
    found = explored(Plan(replace(FOUR, num_pages=4), SHORT[:2], PAUSES), at_least=1_500)
    for longest in longest_runs(found):
        assert longest.num_events <= 13
        assert longest.num_preemptions <= 1


def a_circle(*, is_open: bool) -> Exploration:
    """States 0 -> 1 -> 2, and back to 0 if it is not open; if it is, 2 has nothing to run."""
    states = {key: State(key - 1 if key else None, (str(key),), is_busy=True) for key in range(3)}
    for key, state in states.items():
        state.following[("schedule",)] = Edge((key + 1) % 3, num_preempted=1)
    states[2].is_busy, states[2].is_stalled = not is_open, is_open
    return Exploration(states)


def test_a_run_that_comes_to_its_end_is_counted():
    assert runs_to_the_end(a_circle(is_open=True), is_deep=True) == Runs(2, 2)


def test_a_run_that_never_ends_is_found():
    with pytest.raises(LawBroken, match="every run comes to its end"):
        runs_to_the_end(a_circle(is_open=False), is_deep=True)


def test_a_state_that_comes_again_is_found():
    check_no_circle(a_circle(is_open=True))
    with pytest.raises(LawBroken, match="no state comes again"):
        check_no_circle(a_circle(is_open=False))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_retries_of_steps_that_fail_and_pools_that_are_lost():
    found = explored(Plan(replace(FOUR, max_retries=2), SHORT, FAILURES), at_least=20_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 13


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_canary_in_three_requests_of_two_classes():
    found = explored(Plan(replace(CANARY, max_num_batched_tokens=4), SHORT, SHARES), at_least=5_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 16


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_failures_and_all_other_events():
    explored(Plan(FOUR, SHORT, DISTURBANCES - {"new version"}), at_least=25_000)


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
    names = DISTURBANCES - FAILURES
    explored(Plan(replace(FOUR, digest=same_digest), SHORT, names), at_least=20_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_pauses_the_first_states_of_three_requests_and_all_events_keep_the_laws():
    explorer = Explorer(Plan(FOUR, SHORT, DISTURBANCES | PAUSES))
    assert len(explorer.run(max_states=100_000).states) >= 100_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_longer_requests_with_all_events_at_once():
    found = explored(Plan(SETUP, LONG, DISTURBANCES - FAILURES), at_least=80_000)
    for longest in longest_runs(found):
        assert longest.num_events <= 26
        assert longest.num_preemptions <= 2
