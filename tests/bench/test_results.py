"""Which repetitions are taken, which are kept, and the line that they become."""

from __future__ import annotations

import json

import pytest

from bench.machine import Reading, Span
from bench.results import Failure, Repetition, Result, Statistic, quietest, repeat

CONTEXT = {"model": "m", "jax": "1.2"}


class Machine:
    """Each repetition takes `seconds` while others use the next of `others` cores."""

    def __init__(self, others: list[float | None], seconds: float = 10.0):
        self._others = iter(others)
        self._seconds = seconds
        self._now = Reading(0.0, 0.0, 0.0)
        self.num_runs = 0

    def clocks(self) -> Reading:
        return self._now

    def once(self) -> dict[str, float]:
        others, now = next(self._others), self._now
        busy = None if others is None or now.busy_s is None else now.busy_s
        self._now = Reading(
            now.time_s + self._seconds,
            now.own_s + self._seconds,
            None if busy is None else busy + self._seconds * (1 + (others or 0.0)),
        )
        self.num_runs += 1
        return {"load_s": float(self.num_runs)}

    def repeat(self, wanted: int) -> list[Repetition]:
        return repeat(self.once, wanted, self.clocks)


def repetition(figure: float, others: float | None) -> Repetition:
    return Repetition({"load_s": figure}, Span(wall_s=figure * 2, cpu_s=figure * 3, others=others))


def test_quiet_repetitions_are_taken_once():
    assert len(Machine([0.0, 0.1, 0.05]).repeat(3)) == 3


def test_a_disturbed_repetition_is_run_again():
    taken = Machine([0.0, 0.7, 0.0, 0.0]).repeat(3)
    assert [round(r.others, 2) for r in taken] == [0.0, 0.7, 0.0, 0.0]


def test_at_most_twice_as_many_are_run():
    machine = Machine([0.5] * 10)
    machine.repeat(3)
    assert machine.num_runs == 6


def test_no_more_are_begun_after_four_minutes_of_looking_for_quiet():
    machine = Machine([0.5] * 10, seconds=70.0)
    machine.repeat(3)
    assert machine.num_runs == 4  # 210 s after the third, 280 s after the fourth


def test_the_wanted_number_is_run_however_long_it_takes():
    assert len(Machine([0.5] * 10, seconds=1000.0).repeat(3)) == 3


def test_what_cannot_be_read_counts_as_quiet():
    assert len(Machine([None, None]).repeat(2)) == 2


def test_the_quietest_are_kept():
    kept = quietest([repetition(1, 0.5), repetition(2, None), repetition(3, 0.1)], 2)
    assert [r.figures["load_s"] for r in kept] == [2, 3]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 1.0, 2.0], Statistic(2.0, 1.0, 3.0)),
        ([4.0, 1.0], Statistic(2.5, 1.0, 4.0)),
        ([7.0], Statistic(7.0, 7.0, 7.0)),
    ],
)
def test_a_statistic_is_median_least_and_most(values: list[float], expected: Statistic):
    assert Statistic.of(values) == expected


def a_result(*others: float | None) -> Result:
    taken = [repetition(float(i), x) for i, x in enumerate(others, 1)]
    return Result.of("load", "a title", taken, wanted=2)


def test_a_result_is_of_the_kept_repetitions_only():
    result = a_result(0.9, 0.0, 0.05)
    assert result.metrics == {"load_s": Statistic(2.5, 2.0, 3.0)}
    assert result.wall_s == Statistic(5.0, 4.0, 6.0)
    assert result.cpu_s == Statistic(7.5, 6.0, 9.0)
    assert result.others == Statistic(0.025, 0.0, 0.05)
    assert (result.num_kept, result.num_run) == (2, 3)


@pytest.mark.parametrize(
    ("others", "is_disturbed"), [((0.2, 0.0), False), ((0.0, 0.21), True), ((None, None), False)]
)
def test_a_result_above_a_fifth_of_a_core_is_disturbed(
    others: tuple[float | None, ...], is_disturbed: bool
):
    assert a_result(*others).is_disturbed is is_disturbed


def test_a_line_holds_the_figures_and_what_they_depend_on():
    line = json.loads(json.dumps(a_result(0.0, 0.1).line(CONTEXT)))
    assert line == {
        "measure": "load",
        "load_s": {"median": 1.5, "min": 1.0, "max": 2.0},
        "title": "a title",
        "wall_s": {"median": 3.0, "min": 2.0, "max": 4.0},
        "cpu_s": {"median": 4.5, "min": 3.0, "max": 6.0},
        "others": {"median": 0.05, "min": 0.0, "max": 0.1},
        "num_kept": 2,
        "num_run": 2,
        "is_disturbed": False,
        "model": "m",
        "jax": "1.2",
    }


def test_a_line_of_an_unread_machine_has_null_for_others():
    assert a_result(None, None).line(CONTEXT)["others"] is None


def test_a_line_of_a_failure_holds_its_words():
    assert Failure("prefill", "a title", "too long").line(CONTEXT) == {
        "measure": "prefill",
        "title": "a title",
        "error": "too long",
        "model": "m",
        "jax": "1.2",
    }
