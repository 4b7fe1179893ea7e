"""Each seeded bug breaks the law that it should, within a bounded exploration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduling.exploration import Explorer, LawBroken, Plan
from tests.scheduling.faults import FAULTS
from tests.scheduling.plans import LONG

MAX_STATES = 1500


@pytest.mark.parametrize("name", FAULTS)
def test_the_exploration_finds(name, monkeypatch):
    fault = FAULTS[name]
    fault.patch(monkeypatch)
    plan = Plan(fault.setup, fault.requests, frozenset(fault.events))
    with pytest.raises(LawBroken) as caught:
        Explorer(plan).run(MAX_STATES)
    assert str(caught.value).startswith(fault.caught_by)


def test_what_is_explored_for_the_faults_keeps_the_laws_without_them():
    for setup in {replace(fault.setup, shares=()) for fault in FAULTS.values()}:
        Explorer(Plan(setup, LONG, frozenset())).run(MAX_STATES)
