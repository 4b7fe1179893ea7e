"""Tests of the versions of the weights in an engine: added, served, dropped, and freed once."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.errors import EngineFailure, InvalidRequest, PoolLost
from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.versions import ModelVersion, Versions
from tests.fakes import EOS, FakeRunner, FakeTokenizer, make_engine, run_all

OLD, NEW = (ModelVersion(name, None, frozenset({EOS})) for name in ("old", "new"))


def request(name: str, *, version: str | None = None, max_tokens: int = 4, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n)
    return Request(name, (1, 2, 3), sampling, version=version)


class TwoVersions:
    """An engine that serves the new one and still has the old one."""

    def __init__(self, *, max_retries: int = 2):
        self.runner = FakeRunner(versions={"old": 0, "new": 1})
        self.engine = make_engine(self.runner, version="old", max_retries=max_retries)
        self.engine.add_version(NEW)
        self.engine.serve_version("new")

    def begin(self, *requests: Request, num_steps: int = 2) -> None:
        """Afterwards each is in a step under way."""
        for each in requests:
            self.engine.submit(each)
        for _ in range(num_steps):
            self.engine.step()

    @property
    def is_under_way(self) -> bool:
        return bool(self.engine._flights)


def drain(engine: Engine) -> None:
    run_all(engine)


# The book of versions


def test_the_first_is_current_until_another_is():
    versions = Versions(OLD)
    assert versions.choose(None) is OLD
    versions.add(NEW)
    assert versions.choose(None) is OLD
    versions.become_current("new")
    assert (versions.current, versions.choose(None)) == ("new", NEW)
    assert versions.choose("old") is OLD
    assert versions.names == ("old", "new")


def test_one_that_is_not_there_takes_no_requests_and_the_error_says_which_do():
    versions = Versions(OLD)
    with pytest.raises(InvalidRequest, match="'new' takes no requests; there is old") as caught:
        versions.choose("new")
    assert caught.value.param == "version"
    with pytest.raises(InvalidRequest):
        versions.become_current("new")
    assert versions.current == "old"


def test_a_retired_one_takes_no_requests_and_does_not_become_current_again():
    versions = Versions(OLD)
    versions.add(NEW)
    versions.retire("new")
    assert versions.names == ("old", "new")
    for refused in (versions.choose, versions.become_current):
        with pytest.raises(InvalidRequest, match=r"takes no requests; there is old$"):
            refused("new")


def test_one_that_is_there_is_not_added_again_though_it_is_retired():
    versions = Versions(OLD)
    versions.add(NEW)
    for _ in range(2):
        with pytest.raises(ValueError, match="new is there already"):
            versions.add(NEW)
        versions.retire("new")


def test_the_current_one_is_not_retired():
    versions = Versions(OLD)
    with pytest.raises(ValueError, match="old is current; make another one current first"):
        versions.retire("old")
    assert not versions.has_retired
    assert versions.choose(None) is OLD


def test_to_retire_one_that_is_not_there_changes_nothing():
    versions = Versions(OLD)
    versions.retire("other")
    assert not versions.has_retired
    assert versions.let_go(()) == []


def test_a_retired_one_is_let_go_once_after_its_last_sequence_and_its_last_step():
    versions = Versions(OLD)
    versions.add(NEW)
    for _ in range(2):
        versions.begin("new")
    versions.retire("new")
    versions.retire("new")
    assert versions.let_go({"new"}) == []
    versions.end("new")
    assert (versions.num_live("new"), versions.let_go(())) == (1, [])
    versions.end("new")
    assert versions.let_go({"new"}) == []
    assert versions.let_go({"old"}) == ["new"]
    assert versions.let_go(()) == []
    assert versions.names == ("old",)
    versions.add(NEW)  # it may come again
    assert versions.choose("new") is NEW


def test_one_that_is_not_retired_stays_though_nobody_needs_it():
    versions = Versions(OLD)
    versions.add(NEW)
    assert versions.let_go(()) == []
    assert versions.names == ("old", "new")


# In an engine


def test_a_request_that_names_no_version_gets_the_current_one_and_is_told():
    two = TwoVersions()
    answers = run_all(two.engine, [request("a"), request("b", version="old")])
    told = {name: answers[name, 0].stats for name in "ab"}
    assert {name: stats and stats.version for name, stats in told.items()} == {
        "a": "new",
        "b": "old",
    }
    assert answers["a", 0].token_ids != answers["b", 0].token_ids
    assert two.runner.faults == []


def test_a_request_for_a_version_that_is_not_there_is_refused():
    two = TwoVersions()
    with pytest.raises(InvalidRequest, match="'newer' takes no requests; there is old, new"):
        two.engine.submit(request("a", version="newer"))
    assert not two.engine.has_requests
    two.engine.submit(request("a"))  # its id is free


def test_an_idle_version_is_freed_when_it_is_dropped():
    two = TwoVersions()
    two.engine.drop_version("old")
    assert two.runner.dropped == ["old"]
    assert two.engine.versions == ("new",)
    two.engine.drop_version("old")
    two.engine.step()
    assert two.runner.dropped == ["old"]


def test_the_current_version_is_not_dropped_and_serves_on():
    two = TwoVersions()
    with pytest.raises(ValueError, match="new is current"):
        two.engine.drop_version("new")
    assert run_all(two.engine, [request("a")])["a", 0].finish_reason is FinishReason.LENGTH
    assert two.runner.dropped == []


def test_a_dropped_version_ends_what_it_began_and_takes_nothing_new():
    two = TwoVersions()
    two.begin(request("a", version="old", max_tokens=6))
    two.engine.drop_version("old")
    with pytest.raises(InvalidRequest, match="takes no requests"):
        two.engine.submit(request("b", version="old"))
    assert two.runner.dropped == []
    while two.engine.has_requests:
        two.engine.step()
        assert two.runner.dropped == [] or not two.engine.has_requests
    drain(two.engine)
    assert two.runner.dropped == ["old"]
    assert two.runner.faults == []


def test_all_choices_of_a_request_stay_with_their_version():
    two = TwoVersions()
    two.begin(request("a", version="old", n=3))
    two.engine.drop_version("old")
    drain(two.engine)
    assert {batch.version for batch in two.runner.batches} == {"old"}
    assert two.runner.dropped == ["old"]
    assert two.runner.faults == []


def test_a_drop_waits_for_a_step_that_nobody_else_waits_for():
    """One step is dispatched too many where an answer ends before its length says so."""
    two = TwoVersions()
    two.begin(request("a", version="old", max_tokens=9))
    two.engine.abort("a")
    assert two.is_under_way
    assert not two.engine.has_work()
    two.engine.drop_version("old")
    assert two.runner.dropped == []
    assert two.engine.has_work()
    drain(two.engine)
    assert two.runner.dropped == ["old"]
    assert two.runner.faults == []


def test_an_abort_under_way_frees_the_version_when_its_step_was_read():
    two = TwoVersions()
    two.begin(request("a", version="old", max_tokens=9))
    two.engine.drop_version("old")
    assert two.is_under_way
    two.engine.abort("a")
    assert two.runner.dropped == []
    assert two.engine.has_work()  # though nobody waits for what it brings
    drain(two.engine)
    assert two.runner.dropped == ["old"]
    assert two.runner.faults == []


def test_an_abort_frees_the_version_at_once_when_nothing_is_under_way():
    two = TwoVersions()
    two.engine.submit(request("a", version="old"))
    two.engine.drop_version("old")
    two.engine.abort("a")
    assert two.runner.dropped == ["old"]
    assert not two.engine.has_work()


def test_to_abort_all_frees_it_too():
    two = TwoVersions()
    two.engine.submit(request("a", version="old"))
    two.engine.drop_version("old")
    two.engine.abort_all(EngineFailure("by hand"))
    assert two.runner.dropped == ["old"]


def test_a_paused_request_keeps_its_dropped_version():
    two = TwoVersions()
    two.begin(request("a", version="old", max_tokens=9))
    two.engine.pause("a")
    two.engine.drop_version("old")
    run_all(two.engine, [request("b")])
    assert two.runner.dropped == []
    two.engine.resume("a")
    answers = run_all(two.engine)
    assert answers["a", 0].finish_reason is FinishReason.LENGTH
    assert two.runner.dropped == ["old"]
    assert two.runner.faults == []


def test_a_dropped_version_is_kept_over_a_recovery_for_those_that_go_on():
    two = TwoVersions()
    two.begin(request("a", version="old", max_tokens=9))
    two.engine.drop_version("old")
    two.engine.recover(ZeroDivisionError("by hand"))
    assert two.runner.dropped == []
    answers = run_all(two.engine)
    assert answers["a", 0].finish_reason is FinishReason.LENGTH
    assert two.runner.dropped == ["old"]
    assert two.runner.faults == []


def test_a_dropped_version_goes_with_a_recovery_that_ends_its_last_request():
    two = TwoVersions(max_retries=0)
    two.begin(request("a", version="old", max_tokens=9))
    two.engine.drop_version("old")
    two.engine.recover(ZeroDivisionError("by hand"))
    answers = run_all(two.engine)
    assert answers["a", 0].finish_reason is FinishReason.ERROR
    assert two.runner.dropped == ["old"]
    assert two.runner.faults == []


def test_a_recovery_that_drops_the_last_step_under_way_frees_its_version():
    two = TwoVersions()
    two.begin(request("a", version="old", max_tokens=9))
    two.engine.drop_version("old")
    two.engine.abort("a")
    assert two.runner.dropped == []
    two.engine.recover(ZeroDivisionError("by hand"))  # e.g. of a pause: no step may follow
    assert two.runner.dropped == ["old"]
    assert not two.engine.has_work()


def test_a_lost_pool_is_told_of_every_version_that_may_be_to_blame():
    two = TwoVersions()

    def lose(batch: Batch) -> None:
        if batch.version == "new":
            raise PoolLost("by hand")

    two.begin(request("a", version="old", max_tokens=9), num_steps=1)
    two.runner.on_step = lose
    two.engine.submit(request("b", version="new"))
    told = [two.engine.step().failed_versions for _ in range(3)]
    assert ("old", "new") in told


def test_a_retry_goes_on_with_the_version_that_it_began_with():
    two = TwoVersions()
    two.runner.fail_at = frozenset({1})
    two.begin(request("a", version="old"), num_steps=1)
    two.engine.drop_version("old")
    answers = run_all(two.engine)
    assert answers["a", 0].finish_reason is FinishReason.LENGTH
    assert {batch.version for batch in two.runner.batches} == {"old"}
    assert two.runner.dropped == ["old"]


def test_a_version_comes_again_after_it_went_with_its_own_tokenizer():
    two = TwoVersions()
    two.engine.drop_version("old")
    two.runner.versions = {"old": 5, "new": 1}
    tokenizer: Any = FakeTokenizer()
    two.engine.add_version(ModelVersion("old", tokenizer, frozenset()))
    answers = run_all(two.engine, [request("a", version="old"), request("b")])
    assert len(answers["a", 0].text) == 4
    assert answers["b", 0].text == ""
    assert two.runner.faults == []


def test_the_same_prompt_finds_the_pages_of_its_own_version_only():
    two = TwoVersions()
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    prompt = tuple(range(17))

    def num_cached(name: str, version: str) -> int:
        again = Request(name, prompt, sampling, version=version)
        stats = run_all(two.engine, [again])[name, 0].stats
        return -1 if stats is None else stats.num_cached_tokens

    assert [num_cached(version, version) for version in ("old", "new")] == [0, 0]
    assert [num_cached(f"{version} again", version) for version in ("old", "new")] == [16, 16]
    assert two.runner.faults == []


# Shares


def versions_of_steps(two: TwoVersions) -> list[str]:
    two.runner.batches.clear()
    for version in ("old", "new"):
        name = f"{version} {two.engine.pool_stats().num_running}"
        two.engine.submit(request(name, version=version, max_tokens=40))
    for _ in range(20):
        two.engine.step()
    return [batch.version for batch in two.runner.batches[5:15]]


def test_steps_are_given_by_shares():
    two = TwoVersions()
    two.engine.set_shares({"old": 0.75, "new": 0.25})
    assert versions_of_steps(two).count("old") in (7, 8)


def test_shares_are_kept_over_a_recovery():
    two = TwoVersions()
    two.engine.set_shares({"old": 0.99, "new": 0.01})
    two.engine.recover(ZeroDivisionError("by hand"))
    assert versions_of_steps(two).count("new") == 2


def test_the_share_of_a_dropped_version_goes_with_it():
    two = TwoVersions()
    two.engine.set_shares({"old": 0.0, "new": 1.0})
    two.engine.drop_version("old")
    two.runner.versions = {"old": 0, "new": 1}
    two.engine.add_version(OLD)
    assert versions_of_steps(two).count("old") == 5


def test_a_share_that_is_none_changes_nothing():
    two = TwoVersions()
    two.engine.set_shares({"old": 0.99, "new": 0.01})
    with pytest.raises(ValueError, match="the share of version old is -1"):
        two.engine.set_shares({"old": -1, "new": 1})
    two.engine.recover(ZeroDivisionError("by hand"))
    assert versions_of_steps(two).count("new") == 2
