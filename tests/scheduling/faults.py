"""Bugs that a scheduler could have, each as a patch of one method, and the law that finds it.

A patch changes what the production code does and nothing of the tests' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxinfer.scheduling import prefix_index, scheduler, version_turns
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.prefix_index import PrefixIndex
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.retries import Retries
from jaxinfer.scheduling.running import Running
from jaxinfer.scheduling.running_table import RunningTable
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.seating import Seating
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.sequence_heap import SequenceHeap
from jaxinfer.scheduling.steps_under_way import StepsUnderWay
from jaxinfer.scheduling.version_turns import VersionTurns
from tests.scheduling.plans import CANARY, COLLIDING, LONG, LONG_ANSWERS, SETUP
from tests.scheduling.world import Setup

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A seeded bug.

    Args:
        patch: brings it in.
        caught_by: how the error of the first broken law begins.
        events: that have to happen for it to show, beside submit, schedule and read.
    """

    patch: Patch
    caught_by: str
    events: tuple[str, ...] = ()
    setup: Setup = SETUP
    requests: tuple[Request, ...] = LONG


ROOMY = replace(CANARY, num_pages=12)
FAULTS: dict[str, Fault] = {}


def fault(
    caught_by: str,
    *events: str,
    setup: Setup = SETUP,
    requests: tuple[Request, ...] = LONG,
) -> Callable[[Patch], Patch]:
    """Enters a patch in FAULTS under its name."""

    def enter(patch: Patch) -> Patch:
        FAULTS[patch.__name__] = Fault(patch, caught_by, events, setup, requests)
        return patch

    return enter


@fault("the ref counts are not those of the page tables")
def a_shared_page_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(self: PagePool, pages: list[int]) -> None:
        for page in pages:
            if self._num_refs[page] == 0:
                del self._cached[page]
                self._num_refs[page] = 1

    monkeypatch.setattr(PagePool, "share", share)


@fault("the ref counts are not those of the page tables")
def a_shared_page_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    share = PagePool.share

    def share_twice(self: PagePool, pages: list[int]) -> None:
        share(self, pages)
        share(self, pages)

    monkeypatch.setattr(PagePool, "share", share_twice)


@fault("the ref counts are not those of the page tables")
def the_first_page_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, pages[1:]))


@fault("page 0 was released twice")
def pages_are_released_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagePool.release

    def release_twice(self: PagePool, pages: list[int]) -> None:
        release(self, pages)
        release(self, pages)

    monkeypatch.setattr(PagePool, "release", release_twice)


@fault("the ref counts are not those of the page tables", "abort")
def an_abort_leaks_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = Scheduler.abort

    def leaking(self: Scheduler, request_id: str) -> list[Sequence]:
        for sequence in self._by_request.get(request_id, ()):
            del sequence.page_table[-1:]
        return abort(self, request_id)

    monkeypatch.setattr(Scheduler, "abort", leaking)


@fault("law: no indexed page is written")
def pages_are_indexed_when_they_are_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    add = StepsUnderWay.add

    def add_and_index(self: StepsUnderWay, scheduled: Any) -> None:
        add(self, scheduled)
        for sequence in scheduled.sequences:
            num_known = min(sequence.num_scheduled_tokens, len(sequence.token_ids))
            self._table.copy_pages(sequence, self._pool.index_computed(sequence, num_known))

    monkeypatch.setattr(StepsUnderWay, "add", add_and_index)


@fault("law: a step reads its own context only", setup=COLLIDING)
def a_hit_does_not_compare_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(self: PrefixIndex, page: int, sequence: Sequence, at: int, parent: int) -> bool:
        entry = self._entries[page]
        return entry.parent == parent and entry.salt == sequence.salt

    monkeypatch.setattr(PrefixIndex, "_holds", holds)


@fault("law: a step reads its own context only", "new version")
def a_hit_and_its_digest_ignore_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(self: PrefixIndex, page: int, sequence: Sequence, at: int, parent: int) -> bool:
        entry = self._entries[page]
        tokens = sequence.page_tokens(at, self._page_size)
        return entry.parent == parent and entry.tokens == tokens

    monkeypatch.setattr(prefix_index, "_root", lambda salt: b"any")
    monkeypatch.setattr(PrefixIndex, "_holds", holds)


@fault("law: a step computes the sequence's own tokens")
def the_last_token_of_a_prompt_is_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def match(self: PagePool, sequence: Sequence) -> list[int]:
        pages: list[int] = []
        for place in range(sequence.num_tokens // self.page_size):
            page = self.index.find(sequence, place, pages[-1] if pages else -1)
            if page is None:
                break
            pages.append(page)
        return pages

    monkeypatch.setattr(PagePool, "match", match)


@fault("page 0 is evicted before 1 children")
def a_parent_is_evicted_before_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, pages[::-1]))


@fault("the ref counts are not those of the page tables")
def a_page_in_use_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(self: PagePool) -> int:
        page = next(page for page in self.index._entries if self.index.is_leaf(page))
        self._cached.pop(page, None)
        self.index.remove(page)
        return page

    monkeypatch.setattr(PagePool, "_evict", evict)


@fault("law: pages of a failed one leave the index", "fail read")
def pages_of_a_failed_sequence_stay_in_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "forget", lambda self, pages: None)


@fault("list index out of range", "abort")
def what_a_step_computes_for_one_that_went_away_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = RunningTable.stand

    def stand_unseen(self: RunningTable, sequence: Sequence) -> None:
        seat, sitting = sequence.seat, self.sitting[sequence.seat]
        stand(self, sequence)
        self.sitting[seat] = sitting

    monkeypatch.setattr(RunningTable, "stand", stand_unseen)


@fault("list index out of range", "abort")
def a_new_sitter_is_taken_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sit = RunningTable.sit

    def sit_unseen(self: RunningTable, sequence: Sequence, num_computed: int) -> None:
        self.num_sat = 0
        sit(self, sequence, num_computed)

    monkeypatch.setattr(RunningTable, "sit", sit_unseen)


@fault("law: who is sampled gets its token")
def the_token_of_a_preempted_sequence_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    note_drawn = StepsUnderWay._note_drawn

    def without_preempted(
        self: StepsUnderWay, scheduled: Any, tokens: list[int], sits: Any, broken: list[Sequence]
    ) -> None:
        preempted = [s for s in scheduled.sampled if s.status is Status.PREEMPTED]
        note_drawn(self, scheduled, tokens, sits, broken + preempted)

    monkeypatch.setattr(StepsUnderWay, "_note_drawn", without_preempted)


@fault("law: what is drawn behind a failed step is nobody's", "fail read")
def a_retried_sequence_takes_what_was_drawn_behind_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note_drawn = StepsUnderWay._note_drawn

    def of_all(
        self: StepsUnderWay, scheduled: Any, tokens: list[int], draws: Any, broken: list[Sequence]
    ) -> None:
        note_drawn(self, scheduled, tokens, np.ones_like(draws), broken)

    monkeypatch.setattr(StepsUnderWay, "_note_drawn", of_all)


@fault("law: a trial is alone", "fail read")
def a_trial_begins_while_a_step_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepsUnderWay, "__len__", lambda self: 0)


@fault("law: what does not run waits", "fail read")
def the_last_try_is_made_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(self: Retries, sequence: Sequence) -> bool:
        if sequence.num_retries:
            self._counted.add(sequence)
        return False

    monkeypatch.setattr(Retries, "enter", enter)


@fault("law: who ends by failures was alone", "fail read")
def who_meets_a_failure_has_had_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "count", lambda self, sequence: False)


@fault("law: retries are of the living", "fail read", "abort")
def an_aborted_sequence_is_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Retries, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if self.trial is sequence:
            self.trial = None

    monkeypatch.setattr(Retries, "remove", forget)


@fault("law: a preempted one awaits the token on its way")
def a_preempted_sequence_resumes_before_its_token_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = Running.stop

    def stop_for_now(self: Running, sequence: Sequence) -> list[int]:
        pages = stop(self, sequence)
        sequence.is_awaited = False
        return pages

    monkeypatch.setattr(Running, "stop", stop_for_now)


@fault("law: something can run when nothing is under way")
def a_sequence_is_held_back_for_a_page_that_nobody_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepsUnderWay, "is_filling", lambda self, digest: True)


@fault("law: the lowest class and its worst give way first")
def another_than_the_worst_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    def best_of_worse(self: Running, sequence: Sequence) -> Sequence | None:
        return next(iter(self.worse(sequence)), None)

    monkeypatch.setattr(Running, "giving_way_to", best_of_worse)


@fault("law: the lowest class and its worst give way first", setup=replace(SETUP, max_num_seqs=2))
def another_than_the_worst_gives_way_to_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def best_of_worse(self: Seating, sequence: Sequence, *rest: Any) -> list[Sequence]:
        return self._running.worse(sequence)[:1]

    monkeypatch.setattr(Seating, "_giving_way", best_of_worse)


@fault("law: nobody waits for one that takes longer", setup=replace(SETUP, num_pages=12))
def whoever_came_first_takes_all_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    by_turn = Seating.next

    def after_all(self: Seating, draft: Any, turn: Any) -> Sequence | None:
        return None if turn else by_turn(self, draft, turn)

    monkeypatch.setattr(Seating, "next", after_all)


@fault("law: the best of those that are behind goes on")
def nothing_is_kept_for_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_share", lambda sequence, budget: 0)


@fault("law: what has waited too long ends, and nothing else", "expire")
def a_queue_deadline_ends_what_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire_all(self: Scheduler, now: float) -> list[Sequence]:
        expired: list[Sequence] = []
        while (first := self._queue_deadlines.peek()) is not None and first[0] < now:
            expired.append(first[1])
            self.finish(first[1])
        return expired

    monkeypatch.setattr(Scheduler, "expire_queued", expire_all)


@fault("law: a resumed one has pages for all its tokens")
def a_resume_asks_for_too_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_if_new(self: Seating, sequence: Sequence, end: int) -> tuple[int, int]:
        return self._pool.pages_for(end), 0

    monkeypatch.setattr(Seating, "_num_pages", as_if_new)


@fault("law: a step has one version", "new version")
def two_versions_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = Running.seats

    def everybody(self: Running, version: str) -> Any:
        if self._turns.is_mixed:
            return seats(self, version)
        return np.array([sequence.seat for sequence in self], np.intp)

    monkeypatch.setattr(Running, "seats", everybody)


@fault("law: versions take turns", "new version")
def a_version_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionTurns, "take", lambda self, version: None)


@fault("law: steps are given by shares", "new version", setup=CANARY)
def shares_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionTurns, "set_shares", lambda self, shares: None)


@fault("law: steps are given by shares", "new version", setup=CANARY)
def one_that_comes_anew_has_its_turn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    order = VersionTurns.order

    def order_anew(self: VersionTurns, waiting: str | None) -> list[str]:
        if waiting is not None and waiting not in self._leads:
            self._leads[waiting] = self._last_turn[waiting] = 0
        return order(self, waiting)

    monkeypatch.setattr(VersionTurns, "order", order_anew)


@fault("law: a small share is not starved", "new version", setup=ROOMY, requests=LONG_ANSWERS)
def the_wait_of_a_small_share_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_turns, "MAX_APART", 1000)


@fault(
    "law: versions take turns", "new version", "equal shares", setup=CANARY, requests=LONG_ANSWERS
)
def a_dropped_share_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_more(self: VersionTurns, shares: Mapping[str, float]) -> None:
        self._shares |= shares

    monkeypatch.setattr(VersionTurns, "set_shares", set_more)


@fault("assert sorted(s for some in seats for s in some) == sorted(s.seat for s in sequences)")
def who_runs_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Running.start

    def start_unseen(self: Running, sequence: Sequence, num_computed: int) -> None:
        seats = self._seats
        start(self, sequence, num_computed)
        self._seats = seats

    monkeypatch.setattr(Running, "start", start_unseen)


@fault("room of seat 0")
def a_seat_believes_in_more_room_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    add_pages = RunningTable.add_pages

    def add_too_much(self: RunningTable, sequence: Sequence, pages: list[int]) -> None:
        add_pages(self, sequence, pages)
        self.room[sequence.seat] += 1

    monkeypatch.setattr(RunningTable, "add_pages", add_too_much)


@fault("law: a step has pages for all that it computes")
def a_chunk_goes_past_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_take_pages", lambda self, sequence, end: end)


@fault("law: a row has its own page table")
def a_step_takes_over_an_old_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    add_pages = RunningTable.add_pages

    def add_unseen(self: RunningTable, sequence: Sequence, pages: list[int]) -> None:
        num_writes = self.num_writes
        add_pages(self, sequence, pages)
        self.num_writes = num_writes

    monkeypatch.setattr(RunningTable, "add_pages", add_unseen)


@fault("law: no step goes past the end")
def a_step_goes_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched = Scheduler._dispatched

    def further(self: Scheduler, draft: Any) -> Any:
        scheduled = dispatched(self, draft)
        self._table.max_total[scheduled.rows.seats] = 99
        return scheduled

    monkeypatch.setattr(Scheduler, "_dispatched", further)


@fault("page table of seat 0")
def a_page_that_became_another_is_not_written_to_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunningTable, "copy_pages", lambda self, sequence, places: None)


@fault("law: a seat holds the newest token")
def a_new_sitter_takes_the_token_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sit = RunningTable.sit

    def sit_on_it(self: RunningTable, sequence: Sequence, num_computed: int) -> None:
        had_drawn = self.has_drawn.copy()
        sit(self, sequence, num_computed)
        self.has_drawn = had_drawn

    monkeypatch.setattr(RunningTable, "sit", sit_on_it)


@fault("law: queue deadlines are of the living", "abort")
def an_ended_sequence_keeps_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = SequenceHeap.remove

    def only_ranked(self: SequenceHeap, sequence: Sequence) -> None:
        if isinstance(self._heap and self._heap[0][0], tuple):
            remove(self, sequence)

    monkeypatch.setattr(SequenceHeap, "remove", only_ranked)


@fault("law: rows without a number are named", "not a number")
def a_row_without_a_number_gets_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "isnan", lambda values: np.zeros(len(values), bool))
