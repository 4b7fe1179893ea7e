"""A scheduler, a GhostDevice and every event that can happen to them.

An event raises AssertionError ("law: ...") where what it did is against a law of the scheduler.
tests/scheduling/laws.py has the laws that hold between events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool, page_digest
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.running import by_class
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.ghosts import GhostDevice, law, solo

MAX_UNDER_WAY = 2
MAX_APART = 4  # steps of others between two of a version, by the promise


@dataclass(frozen=True, slots=True)
class Setup:
    """Limits of a scheduler, as small as they like: SchedulerConfig has floors."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_versions: int = 2  # of weights, that there may be at a time
    max_retries: int = 1
    shares: tuple[tuple[str, float], ...] = ()  # of versions; none: equal ones
    enable_prefix_caching: bool = True
    digest: Callable[[bytes, bytes], bytes] = page_digest

    def scheduler(self) -> Scheduler:
        pool = PagePool(
            self.num_pages, self.page_size, self.enable_prefix_caching, digest=self.digest
        )
        buckets = Buckets.for_limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
        )
        return Scheduler(cast(Any, self), pool, buckets)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way: its number, what it drew, and for whom no more."""

    number: int
    scheduled: Scheduled
    tokens: list[int]
    lost: set[Sequence] = field(default_factory=set[Sequence])


class World:
    """Everything that a scheduler's future depends on, and nothing outside it: it can be pickled.

    `passed` counts, for each weights version, steps in a row that went to another one while it
    could have run; `since`, unless shares are equal, steps since its own last one or since it has
    work. `num_preemptions` and `num_steps` only count.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.device = GhostDevice(setup.num_pages, setup.page_size)
        self.budget = setup.max_num_batched_tokens
        self.num_versions = setup.num_versions
        self.num_seats = min(setup.max_num_seqs, self.budget)
        self.sequences: dict[str, list[Sequence]] = {}
        self.flights: deque[Flight] = deque()
        self.version = "v1"
        self.now = 0.0
        self.shares = dict(setup.shares)
        self.scheduler.set_shares(self.shares)
        self.passed: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self.num_steps = 0
        self.num_preemptions = 0

    @property
    def live(self) -> list[Sequence]:
        return [s for each in self.sequences.values() for s in each if _is_live(s)]

    @property
    def running(self) -> list[Sequence]:
        """Best first."""
        running = [s for s in self.live if s.status is Status.RUNNING]
        return sorted(running, key=lambda sequence: sequence.rank)

    def submit(self, request: Request) -> None:
        self.sequences[request.request_id] = choices = [
            Sequence(request, index=index, seed=0, version=self.version)
            for index in range(request.sampling.n)
        ]
        for sequence in choices:
            self.scheduler.submit(sequence)

    def schedule(self) -> bool:
        """Schedules and dispatches the next step. Returns whether there was one."""
        scheduled = self._scheduled()
        if scheduled is None:
            return False
        number = self.num_steps
        self.num_steps += 1
        self.flights.append(Flight(number, scheduled, self.device.run(number, scheduled)))
        return True

    def fail_dispatch(self) -> bool:
        """The same, but it can not be started: the step before is read, then it is dropped."""
        scheduled = self._scheduled()
        if scheduled is None:
            return False
        if self.flights:
            self.read()
        self._retry(scheduled)
        return True

    def read(self, *, ended: Iterable[Sequence] = (), broken: Iterable[Sequence] = ()) -> None:
        """Reads the oldest step under way.

        Args:
            ended: sequences whose token in it is an end token.
            broken: sequences whose logits in it are not numbers.
        """
        flight = self.flights.popleft()
        sampled = flight.scheduled.sampled
        num_known = [len(s.token_ids) for s in sampled]
        logprobs = np.array([np.nan if s in broken else -1.0 for s in sampled], np.float32)
        result = StepResult(np.array(flight.tokens, np.int32), logprobs, None, None)
        found = self.scheduler.update(flight.scheduled, result, self.now)
        theirs = [s for s in sampled if _is_live(s) and s not in flight.lost]
        is_named = [s for s in found if _is_live(s)] == [s for s in theirs if s in broken]
        law(is_named, "rows without a number are named")
        for sequence, num_before in zip(sampled, num_known, strict=True):
            if not _is_live(sequence):
                continue
            if sequence in flight.lost:
                is_dropped = len(sequence.token_ids) == num_before
                law(is_dropped, "what is drawn behind a failed step is nobody's")
                continue
            if sequence in found:
                self._fail([sequence])
                continue
            known = sequence.token_ids.tolist()
            law(len(known) == num_before + 1, "who is sampled gets its token")
            law(known == list(solo(sequence).tokens[: len(known)]), "tokens are those of it alone")
            if sequence in ended or len(known) >= sequence.max_total_tokens:
                self.scheduler.finish(sequence)

    def fail_read(self) -> None:
        """The oldest step under way turns out to have failed."""
        flight = self.flights.popleft()
        self.device.spoil(flight.number)
        self._retry(flight.scheduled, lost=flight.lost)

    def lose_pool(self) -> None:
        """The device is made anew, and with it the scheduler."""
        before, trial = self.scheduler, self.scheduler.trial
        under_way = [s for f in self.flights for s in f.scheduled.sequences if s not in f.lost]
        blamed = [trial] if trial else [s for s in dict.fromkeys(under_way) if _is_live(s)]
        hopeless = before.blame(blamed)
        self._check_hopeless(hopeless, trial)
        self.flights.clear()
        self.passed.clear()
        self.since.clear()
        self.device = GhostDevice(self.setup.num_pages, self.setup.page_size)
        self.scheduler = self.setup.scheduler()
        self.scheduler.set_shares(self.shares)
        for sequence in self.live:
            sequence.begin_again(sequence.num_output_tokens)
        self.scheduler.take_over(self.live, before)
        self._fail(hopeless)

    def share_equally(self) -> None:
        self.scheduler.set_shares({})
        self.shares.clear()
        self.since.clear()
        self.passed.clear()

    def abort(self, request_id: str) -> None:
        lived = [s for s in self.sequences[request_id] if _is_live(s)]
        law(self.scheduler.abort(request_id) == lived, "an abort ends all choices that live")

    def expire(self) -> None:
        """Time goes on to just after the next deadline, of those that have not run too."""
        run = {s: s.request.deadline_s for s in self.live}
        queued = {s: s.request.queue_deadline_s for s in self.live if is_new(s)}
        deadlines = [at for at in (*run.values(), *queued.values()) if at is not None]
        self.now = max(self.now, min(deadlines) + 0.5)
        late = {s for s, at in run.items() if at is not None and at < self.now}
        law(set(self.scheduler.expire(self.now)) == late, "what is too late ends, and nothing else")
        late = {s for s, at in queued.items() if at is not None and at < self.now} - late
        found = set(self.scheduler.expire_queued(self.now))
        law(found == late, "what has waited too long ends, and nothing else")

    def _scheduled(self) -> Scheduled | None:
        before, ready = _Before(self), self._ready_versions()
        scheduled = self.scheduler.schedule(self.now)
        preempted = [s for s, n in before.num_preemptions.items() if s.num_preemptions > n]
        waits = all(s.status is Status.PREEMPTED for s in preempted)
        law(waits, "what is preempted does not resume in the same step")
        self.num_preemptions += len(preempted)
        if scheduled is None:
            law(not preempted, "nothing is preempted for nothing")
            is_stuck = self.scheduler.has_work() and not self.flights
            law(not is_stuck, "something can run when nothing is under way")
            return None
        self._check_step(scheduled)
        if self.scheduler.trial is None:
            self._check_preempted(scheduled, preempted, before)
            self._check_turn(scheduled, ready)
            self._check_line(scheduled, before)
        for sequence, status in before.statuses.items():
            if sequence.status is Status.RUNNING:
                self._check_started(sequence, status)
        self._check_trial(scheduled)
        return scheduled

    def _check_trial(self, scheduled: Scheduled) -> None:
        """Who has one try left is alone on the device."""
        most = self.setup.max_retries
        last = [s for s in scheduled.sequences if most and s.num_retries == most]
        is_trial = self.scheduler.trial is not None
        law(bool(last) == is_trial, "the last try is a trial")
        if last:
            is_alone = last == scheduled.sequences == [self.scheduler.trial]
            law(is_alone and not self.flights, "a trial is alone")

    def _check_step(self, scheduled: Scheduled) -> None:
        batch, pool = scheduled.batch, self.scheduler.pool
        sequences, num_new = scheduled.sequences, scheduled.rows.num_new.tolist()
        law(len(set(sequences)) == len(sequences) == len(num_new) > 0, "a step has sequences")
        law(min(num_new) > 0, "no sequence computes 0 tokens")
        law(sum(num_new) <= self.budget, "a step keeps to its budget")
        law({s.version for s in sequences} == {batch.version}, "a step has one version")
        at = 0
        for row, (sequence, length) in enumerate(zip(sequences, num_new, strict=True)):
            end = sequence.num_scheduled_tokens
            pages = sequence.page_table
            law(sequence.status is Status.RUNNING, "what is in a step runs")
            law(end < sequence.max_total_tokens, "no step goes past the end")
            law(int(batch.positions[at]) == end - length, "a step begins where the last one ended")
            law(end <= len(pages) * pool.page_size, "a step has pages for all that it computes")
            line = batch.page_table[row].tolist()
            law(line == pages + [0] * (len(line) - len(pages)), "a row has its own page table")
            for page in pages[(end - length) // pool.page_size : -(-end // pool.page_size)]:
                law(page not in pool.index, "no indexed page is written")
                law(pool._num_refs[page] == 1, "no page of two is written")
            is_known = end - length < len(sequence.token_ids)
            law(is_known or not sequence.constraint, "a grammar has read what comes before")
            is_sampled = end >= len(sequence.token_ids)
            law((sequence in scheduled.sampled) == is_sampled, "who is at its end is sampled")
            at += length

    def _check_preempted(
        self, scheduled: Scheduled, preempted: list[Sequence], before: _Before
    ) -> None:
        """The lowest class goes first and in it the worst, for one of a better rank."""
        stayed = [s for s in before.running if s not in preempted]
        for sequence in preempted:
            better = [s for s in scheduled.sequences if s.rank < sequence.rank]
            law(bool(better), "a better one goes on when one is preempted")
            is_first = any(
                before.is_first_to_give_way(sequence, other, stayed)
                if other in before.running
                else before.is_first_to_give_way_to_start(sequence, other, stayed)
                for other in better
            )
            law(is_first, "the lowest class and its worst give way first")

    def _check_line(self, scheduled: Scheduled, before: _Before) -> None:
        """Who takes longer keeps nobody waiting, but for the share of the best, which goes on, and
        for one that resumes before those that wait behind it.
        """
        pool, lengths = self.scheduler.pool, scheduled.rows.num_new.tolist()
        chunks = dict(zip(scheduled.sequences, lengths, strict=True))
        resumed = {s for s, status in before.statuses.items() if status is Status.PREEMPTED}
        longer = {s: n for s, n in chunks.items() if before.is_far(s) and s not in resumed}
        for sequence in self._kept_waiting(scheduled, before):
            needed = self._num_needed(sequence.rank) + pool.pages_for(sequence.max_total_tokens)
            if needed + len(self.running) > pool.num_available:
                continue
            larger = [n for s, n in longer.items() if s.turn > sequence.turn]
            law(sum(larger) <= max(1, self.budget // 4), "nobody waits for one that takes longer")
        far = [s for s in self.running if s.version == scheduled.batch.version and before.is_far(s)]
        if far:
            best, size = min(far, key=lambda s: s.rank), pool.page_size
            is_full = best.num_scheduled_tokens == len(best.page_table) * size
            goes_on = best in chunks or (is_full and not pool.num_available)
            law(goes_on, "the best of those that are behind goes on")

    def _kept_waiting(self, scheduled: Scheduled, before: _Before) -> list[Sequence]:
        """New ones that could have started in the step, or have got only a part of their tokens."""
        waiting = [s for s in before.waiting if s.status is not Status.RUNNING]
        filled = self._filling() | scheduled.filling
        pool, version = self.scheduler.pool, scheduled.batch.version
        cut = [s for s in scheduled.sequences if s.num_scheduled_tokens < len(s.token_ids)]
        # Nobody starts past one that is or was preempted, also in the step in which it resumes.
        statuses = [*map(before.statuses.get, before.waiting), *(s.status for s in self.live)]
        is_open = Status.PREEMPTED not in statuses and len(self.running) < self.num_seats
        if not is_open or not all(s.version == version and not s.num_pages_wanted for s in waiting):
            return cut
        return cut + [s for s in waiting if pool.next_digest(s, len(pool.match(s))) not in filled]

    def _filling(self) -> frozenset[bytes]:
        """Digests of the pages that the steps under way fill."""
        return frozenset[bytes]().union(*(flight.scheduled.filling for flight in self.flights))

    def _num_needed(self, rank: tuple[float, int]) -> int:
        """Pages that those of a better rank lack for their tokens."""
        pool = self.scheduler.pool
        better = [s for s in self.running if s.rank < rank and s.num_behind > 1]
        return sum(max(0, pool.pages_for(s.num_tokens) - len(s.page_table)) for s in better)

    def _check_started(self, sequence: Sequence, before: Status) -> None:
        """A start or a resume: it has pages, the last known token is computed, and it can go on."""
        pool = self.scheduler.pool
        law(before is not Status.PAUSED, "a paused one does not run")
        law(sequence.num_scheduled_tokens > 0, "at least one token is computed")
        if before is Status.PREEMPTED:
            num_pages = pool.pages_for(len(sequence.token_ids))
            law(len(sequence.page_table) >= num_pages, "a resumed one has pages for all its tokens")
            num_free = len(sequence.page_table) - num_pages + pool.num_available
            is_last = num_pages >= pool.pages_for(sequence.max_total_tokens - 1)
            # One that started behind it in this step gives the page back when it is needed.
            has_worse = self.running[-1] is not sequence
            law(is_last or num_free > 0 or has_worse, "a resumed one has a page to go on")

    def _ready_versions(self) -> set[str]:
        """Those that have a running sequence that needs nothing to run, or that could start one."""
        pool, running = self.scheduler.pool, self.running
        ready = {
            s.version
            for s in running
            if s.num_tokens < s.max_total_tokens
            and s.num_scheduled_tokens < len(s.page_table) * pool.page_size
            and (s.constraint is None or s.num_scheduled_tokens < len(s.token_ids))
        }
        waiting = [s for s in self.live if s.status not in (Status.RUNNING, Status.PAUSED)]
        if waiting and len(running) < self.num_seats:
            first = min(waiting, key=lambda sequence: sequence.rank)
            num_pages = pool.pages_for(first.max_total_tokens) + self._num_needed(first.rank)
            has_room = num_pages < pool.num_available
            in_flight = {flight.scheduled.batch.version for flight in self.flights}
            is_held = pool.next_digest(first, len(pool.match(first))) in self._filling()
            if has_room and first.version not in in_flight and not is_held:
                ready.add(first.version)
        return ready

    def _check_turn(self, scheduled: Scheduled, ready: set[str]) -> None:
        version = scheduled.batch.version
        ready.discard(version)
        self.passed = {version: self.passed.get(version, 0) + 1 for version in sorted(ready)}
        longest = max(self.passed.values(), default=0)
        if not self.shares:
            law(longest < self.num_versions, "versions take turns")
            return
        law(longest <= MAX_APART, "a small share is not starved")
        largest = max((self.shares.get(v, 1.0) for v in ready), default=0.0)
        ratio = min(largest / self.shares.get(version, 1.0), MAX_APART)
        law(self.since.get(version, 0) >= int(ratio) - 1, "steps are given by shares")
        versions = {s.version for s in self.live} - {version}
        self.since = {v: min(self.since.get(v, 0) + 1, MAX_APART) for v in sorted(versions)}

    def _retry(self, scheduled: Scheduled, lost: Iterable[Sequence] = ()) -> None:
        """A step has failed: who was in it begins again, or ends."""
        self.scheduler.discard(scheduled)
        pool, trial = self.scheduler.pool, self.scheduler.trial
        living = [s for s in scheduled.sequences if _is_live(s) and s not in lost]
        known = [s.token_ids.tolist() for s in living]
        own = [page for s in living for page in s.page_table if pool._num_refs[page] == 1]
        paused = [s for s in living if s.status is Status.PAUSED]
        hopeless = self.scheduler.retry(living)
        for flight in self.flights:
            flight.lost.update(living)
        self._check_hopeless(hopeless, trial)
        law(known == [s.token_ids.tolist() for s in living], "a retry keeps what was read")
        again = [s for s in living if s not in hopeless]
        waits = all(s.status is Status.PREEMPTED for s in again if s not in paused)
        law(waits, "a retry begins again")
        law(all(s.status is Status.PAUSED for s in again if s in paused), "a pause lasts")
        self._fail(hopeless)
        left = any(page in pool.index and pool.index.is_leaf(page) for page in own)
        law(not left, "pages of a failed one leave the index")

    def _check_hopeless(self, hopeless: list[Sequence], trial: Sequence | None) -> None:
        is_own = not self.setup.max_retries or hopeless in ([], [trial])
        law(is_own, "who ends by failures was alone")

    def _fail(self, sequences: list[Sequence]) -> None:
        index, num_refs = self.scheduler.pool.index, self.scheduler.pool._num_refs
        for sequence in filter(_is_live, sequences):
            own = [page for page in sequence.page_table if num_refs[page] == 1]
            self.scheduler.finish(sequence, is_failed=True)
            left = any(page in index and index.is_leaf(page) for page in own)
            law(not left, "pages of a failed one leave the index")


class _Before:
    """Who ran and who waited before a step was scheduled."""

    def __init__(self, world: World):
        self.running = world.running
        self.statuses = {s: s.status for s in world.live if s.status is not Status.RUNNING}
        self.waiting = [s for s, status in self.statuses.items() if status is not Status.PAUSED]
        self.num_preemptions = {s: s.num_preemptions for s in self.running}
        self._far = {s for s in self.running if s.num_behind > 1}
        has_drawn = world.scheduler._table.has_drawn
        self._drew = {s for s in self.running if has_drawn[s.seat]}

    def is_far(self, sequence: Sequence) -> bool:
        """Whether it had a chunk to compute, as all those do that start."""
        return sequence in self._far or sequence not in self.running

    def is_first_to_give_way(
        self, sequence: Sequence, other: Sequence, stayed: list[Sequence]
    ) -> bool:
        """Whether none of a worse rank than `other` was to give way before it, to go on."""
        return all(by_class(s) < by_class(sequence) for s in stayed if s.rank > other.rank)

    def is_first_to_give_way_to_start(
        self, sequence: Sequence, other: Sequence, stayed: list[Sequence]
    ) -> bool:
        """The same so that `other` starts, which only a better class may ask of those that have
        drawn a token since they last gave way.
        """
        able = [s for s in stayed if self._is_able(s) and s not in self._far]
        return (
            other.request.priority < sequence.request.priority
            and self._is_able(sequence)
            and self.is_first_to_give_way(sequence, other, able)
        )

    def _is_able(self, sequence: Sequence) -> bool:
        return sequence in self._drew or not self.num_preemptions[sequence]


def has_deadline(sequence: Sequence) -> bool:
    """Whether some time would end it."""
    request = sequence.request
    is_queued = request.queue_deadline_s is not None and is_new(sequence)
    return request.deadline_s is not None or is_queued


def is_new(sequence: Sequence) -> bool:
    """Whether it has never run."""
    return sequence.first_scheduled_s is None


def _is_live(sequence: Sequence) -> bool:
    return sequence.status is not Status.FINISHED
