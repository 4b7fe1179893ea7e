"""Which sequences run next, and on which pages.

Host only: no JAX. Time is an argument. There are no phases: a sequence is behind
(num_scheduled_tokens < num_tokens) or not.

Order. `rank` = (arrival_s + priority * AGING_S, number of submission); smaller is better, and it
never changes. So inside a class it is first come, first served, and a sequence of class p waits
behind those of a better class q only if they arrived less than (p - q) * AGING_S seconds after it:
that is the bound of its starvation.

Turns. Each that decodes has its token in every step. What is left of the token budget goes in the
order of (size, rank), to those that run and those that wait alike, and the last one is cut. A size
is one step of doubling (waiting.py). So a prompt of up to half a budget starts in the next step
that is scheduled, whatever longer one is under way. But a quarter of what is left is kept for the
best rank of all that have more than a token to compute. Everybody comes to have the best rank, for
those that come later have a worse one in the end; so a stream of short prompts makes a long one
slower, at most by four, and never stops it.

Progress. Running sequences get pages in the order of their rank. One that finds none takes them
from one of a worse rank: of the lowest class among these, and in it of the worst rank. Without any
it skips the step and keeps what it has. So the best one runs in every step (submission has checked
that it fits alone), and what is preempted was preempted by progress of a better one. It resumes
only when the pages of all its tokens are there at once, with a page to go on.

Versions. A step computes with one version of the weights. Those that have work get steps in
proportion to their shares, and however small its share is, the best one of a version waits for a
bounded number of steps of others (version_turns.py), in which these go on: so nobody is overtaken
for ever. A turn that finds nothing to run, since its tokens must be read first, goes to the next.

Classes. One that waits and finds no seat or no pages may take them from running ones that are of a
lower class and of a worse rank, if that is enough for it to start. Who has given way does not give
way to a start again before it has drawn a token; those that come after (p - q) * AGING_S seconds
find it in a better rank than their own. So it ends, and its preemptions are fewer than its tokens.

A paused sequence has given its pages back and is in no queue; only its deadline still runs. When it
is resumed it goes on as if it had been preempted, at its old rank.

Failures. What was in a step that failed begins again (`retry`) behind the tokens that have been
read. One that has a single try left makes it alone, before everything else, when the steps under
way have been read (retries.py says why that comes to an end).

Pipelining. `schedule` may be called before the step before has been read (`update`), and counts on
what that step will do: its tokens are in KV, its draws are drawn. Where it turns out otherwise (the
sequence has stood up since) the work done for it is dropped. Steps run in the order of their
dispatch, so pages may change hands at once. Only `update` indexes pages for reuse. A sequence with
a grammar draws when its last token was read, for that says which may come next: it sits out the
step between, in which the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

import numpy as np

from jaxinfer.config import SchedulerConfig
from jaxinfer.errors import ConfigError
from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.batch_builder import BatchBuilder
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.length_limit import LengthLimit
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.rank import Turn, rank_of
from jaxinfer.scheduling.retries import Retries
from jaxinfer.scheduling.running import Running
from jaxinfer.scheduling.running_table import RunningTable
from jaxinfer.scheduling.scheduled import Scheduled, StepDraft
from jaxinfer.scheduling.seating import Seating
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.sequence_heap import SequenceHeap
from jaxinfer.scheduling.steps_under_way import StepsUnderWay
from jaxinfer.scheduling.version_turns import VersionTurns
from jaxinfer.scheduling.waiting import Waiting
from jaxinfer.stats import PoolStats

SHARE_OF_BEST = 4  # one in so many tokens of what is left for chunks
_by_turn = attrgetter("turn")


class Scheduler:
    """Owns every sequence from submission to its end.

    Args:
        config: with max_model_len resolved.
    Raises: ConfigError if it is not, or if page tables of `buckets` are too narrow for it.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool, buckets: Buckets):
        if config.max_model_len is None:
            raise ConfigError("max_model_len must be resolved before a Scheduler is made; got None")
        self.limit = LengthLimit(config.max_model_len, pool.num_pages * pool.page_size)
        if pool.pages_for(self.limit.max_total_tokens - 1) > buckets.max_pages_per_seq:
            raise ConfigError(
                f"page tables of {buckets.max_pages_per_seq} pages of {pool.page_size} tokens are "
                f"too narrow for {self.limit.max_total_tokens} tokens"
            )
        self.pool = pool
        self.max_retries = config.max_retries
        self._max_tokens = config.max_num_batched_tokens
        # One token of every step is left for a chunk, so no more run than there are tokens.
        num_seats = min(config.max_num_seqs, self._max_tokens)
        self._table = RunningTable(num_seats, buckets.max_pages_per_seq, pool.page_size)
        self._builder = BatchBuilder(buckets, self._table)
        self._turns = VersionTurns()
        self.running = Running(self._table, self._turns)
        self._under_way = StepsUnderWay(pool, self._table)
        self._waiting = Waiting(pool, self._max_tokens)
        self._seating = Seating(pool, self._waiting, self.running, self._under_way, num_seats)
        self._retries = Retries(config.max_retries)
        self._deadlines = SequenceHeap()
        self._queue_deadlines = SequenceHeap()  # of those that have run too, until they pass
        self._by_request: dict[str, list[Sequence]] = {}
        self._num_paused = 0
        self._num_submitted = 0

    def has_work(self) -> bool:
        return bool(self.running) or len(self._waiting) > 0 or self._retries.has_suspects

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Of the steps, by version, in place of those before; of what is not named it is 1.

        Raises: ValueError for a share below 0, or that is not a finite number.
        """
        self._turns.set_shares(shares)

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence.

        Raises: ContextLengthExceeded if it could never fit.
        """
        request = sequence.request
        sampling = request.sampling
        sequence.max_total_tokens = self.limit.total_tokens(
            sequence.num_prompt_tokens, sampling.max_tokens, sampling.binding_cap
        )
        self._num_submitted += 1
        sequence.rank = rank_of(request, self._num_submitted)
        self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        request = sequence.request
        self._by_request.setdefault(request.request_id, []).append(sequence)
        if sequence.status is Status.PAUSED:
            self._num_paused += 1
            self._retries.remember(sequence)
        else:
            self._queue(sequence, sequence.status)
        if request.deadline_s is not None:
            self._deadlines.push(request.deadline_s, sequence)
        if request.queue_deadline_s is not None:
            self._queue_deadlines.push(request.queue_deadline_s, sequence)

    def schedule(self, now: float) -> Scheduled | None:
        """The next step, with pages for all that it computes; None if nothing can run.

        The caller gives it to `update` or `discard`, in the order of the calls.
        """
        if self._retries.has_suspects:
            return self._schedule_trial(now)
        for version in self._turns.order(self._seating.next_version()):
            draft = StepDraft(self._max_tokens, version)
            if not self._decode_at_once(draft):
                self._decode_by_rank(draft)
            self._compute_chunks(draft, now)
            self._seating.put_back(draft)
            if not draft.is_empty:
                self._turns.take(version)
                return self._dispatched(draft)
        return None

    def update(self, scheduled: Scheduled, result: StepResult, now: float) -> list[Sequence]:
        """Takes over what a step computed and drew, and indexes the pages that it filled.

        Returns: the sequences whose logits were not numbers; the caller fails them. They got no
            token, and no page of this step of theirs is indexed.
        """
        broken = self._under_way.read(scheduled, result, now)
        for sequence in self._retries.note_read(scheduled.sequences):
            self._queue(sequence, sequence.status)
        return broken

    def discard(self, scheduled: Scheduled) -> None:
        """Forgets a step that failed; the caller gives its sequences to `retry`."""
        self._under_way.discard(scheduled)

    def retry(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Lets the living of a step that failed begin again behind the tokens that were read.

        Their KV is not to be trusted (see `finish`), and what steps under way draw for them is
        nobody's. Returns: those that have no try left; the caller fails them.
        """
        living = [s for s in sequences if s.status is not Status.FINISHED]
        hopeless = self.blame(living)
        for sequence in living:
            if sequence in hopeless:
                continue
            if sequence.status is Status.RUNNING:
                self._seating.stop(sequence, is_failed=True)
            sequence.is_awaited = False
            self._waiting.remove(sequence)
            self._retries.withdraw(sequence)
            if sequence.status is not Status.PAUSED:
                self._queue(sequence, Status.PREEMPTED)
        return hopeless

    def _queue(self, sequence: Sequence, status: Status) -> None:
        """One that neither runs nor waits waits to run, or for its trial."""
        sequence.status = status
        sequence.num_pages_wanted = 0
        self._waiting.set_turn(sequence)
        if not self._retries.enter(sequence):
            self._waiting.push(sequence)

    @property
    def trial(self) -> Sequence | None:
        """The sequence that runs alone, if one is on its last try."""
        return self._retries.trial

    def blame(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Counts a failed try of each. Returns: those that have none left."""
        return [sequence for sequence in sequences if not self._retries.count(sequence)]

    def take_over(self, sequences: Iterable[Sequence], before: Scheduler) -> None:
        """Goes on, being new, with the living of a scheduler that is given up.

        Args:
            sequences: with their old ranks; none of them holds anything (`Sequence.begin_again`).
            before: the other one, of which only the totals are read.
        """
        self._num_submitted = before._num_submitted
        self._seating.take_over(before._seating)
        for sequence in sequences:
            self._enter(sequence)

    def finish(self, sequence: Sequence, *, is_failed: bool = False) -> None:
        """Ends a sequence in any state; its pages are free when this returns.

        Args:
            is_failed: its KV is not to be trusted, so what only it owns leaves the prefix index.
        """
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._seating.stop(sequence, is_failed=is_failed)
        self._num_paused -= sequence.status is Status.PAUSED
        self._waiting.remove(sequence)
        self._retries.remove(sequence)
        self._deadlines.remove(sequence)
        self._queue_deadlines.remove(sequence)
        sequence.status = Status.FINISHED
        choices = self._by_request[sequence.request.request_id]
        choices.remove(sequence)
        if not choices:
            del self._by_request[sequence.request.request_id]

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends all choices of a request that still live, and returns them; unknown ids are none."""
        aborted = list(self._by_request.get(request_id, ()))
        for sequence in aborted:
            self.finish(sequence)
        return aborted

    def pause(self, request_id: str) -> None:
        """Takes all choices of a request out of running and waiting; unknown ids are ignored.

        Their pages are free when this returns. A token that is on its way still comes; there is one
        at most, for the call comes with at most one step under way.
        """
        assert len(self._under_way) <= 1, f"{len(self._under_way)} steps are under way"
        for sequence in self._by_request.get(request_id, ()):
            if sequence.status is Status.PAUSED:
                continue
            if sequence.status is Status.RUNNING:
                self._seating.stop(sequence)
            self._waiting.remove(sequence)
            self._retries.withdraw(sequence)
            sequence.status = Status.PAUSED
            self._num_paused += 1

    def resume(self, request_id: str) -> None:
        """Queues the paused choices of a request again."""
        for sequence in self._by_request.get(request_id, ()):
            if sequence.status is Status.PAUSED:
                is_new = sequence.first_scheduled_s is None
                self._num_paused -= 1
                self._queue(sequence, Status.WAITING if is_new else Status.PREEMPTED)

    def expire(self, now: float) -> list[Sequence]:
        """Ends the sequences whose deadline has passed, and returns them."""
        expired: list[Sequence] = []
        while (first := self._deadlines.peek()) is not None and first[0] < now:
            expired.append(first[1])
            self.finish(first[1])
        return expired

    def expire_queued(self, now: float) -> list[Sequence]:
        """The same for those that have never run, and whose queue deadline has passed."""
        expired: list[Sequence] = []
        while (first := self._queue_deadlines.peek()) is not None and first[0] < now:
            self._queue_deadlines.remove(first[1])
            if first[1].first_scheduled_s is None:
                expired.append(first[1])
                self.finish(first[1])
        return expired

    def stats(self) -> PoolStats:
        return PoolStats(
            num_running=len(self.running),
            num_waiting=len(self._waiting) + len(self._retries.waiting),
            pages_total=self.pool.num_pages,
            pages_used=self.pool.num_used,
            pages_cached=self.pool.num_cached,
            pages_free=self.pool.num_free,
            num_preemptions=self._seating.num_preemptions,
            prefix_query_tokens=self._seating.num_query_tokens,
            prefix_hit_tokens=self._seating.num_hit_tokens,
            num_paused=self._num_paused,
        )

    def check_integrity(self) -> None:
        """Raises: AssertionError if pages, owners, queues or the running table disagree."""
        self.pool.check_integrity(s.page_table for s in self.running)
        self.running.check_integrity()
        live = sum(len(choices) for choices in self._by_request.values())
        num_waiting = len(self._waiting) + len(self._retries.waiting)
        num_known = len(self.running) + num_waiting + self._num_paused
        assert live == num_known, f"{live} sequences are live, not {num_known}"
        trial = self._retries.trial
        assert trial is None or trial.status is Status.RUNNING, "the one on trial does not run"

    def _dispatched(self, draft: StepDraft) -> Scheduled:
        """The batch of a step, which counts as done from here on."""
        builder, table = self._builder, self._table
        if draft.has_chunks:
            rows, batch = builder.prefill(
                draft.decoding, draft.others, draft.num_new, draft.version
            )
        else:
            seats = draft.decoding
            if draft.others:
                seats = np.append(seats, [s.seat for s in draft.others])
            rows, batch = builder.decode(seats, draft.version)
        sequences = table.sequences(rows.seats)
        has_all = len(rows.sampled) == len(sequences)
        scheduled = Scheduled(
            batch=batch,
            rows=rows,
            sequences=sequences,
            sampled=sequences if has_all else [sequences[row] for row in rows.sampled],
            sittings=table.sitting[rows.seats],
            filling=frozenset(draft.filling),
            firsts=tuple([sequences[row] for row in rows.fresh]),
        )
        self._under_way.add(scheduled)
        for sequence in draft.others:
            table.is_far[sequence.seat] = sequence.num_behind > 1
        return scheduled

    def _schedule_trial(self, now: float) -> Scheduled | None:
        """A step of a sequence that has one try left, when nothing else is under way.

        It may take pages and a seat from any other, since it gets them but once: submission has
        checked that it fits alone.
        """
        if len(self._under_way):
            return None
        sequence = self._retries.trial
        if sequence is None:
            sequence = self._retries.begin_trial()  # so a fault from here on is its own
            sequence.status = Status.PREEMPTED  # so it starts with pages for all its tokens
            self._seating.start_alone(sequence, self._max_tokens, now)
        draft = StepDraft(self._max_tokens, sequence.version)
        assert sequence.num_tokens <= len(sequence.token_ids), "its next token ends the trial"
        self._go_on(sequence, draft)
        return self._dispatched(draft)

    def _decode_at_once(self, draft: StepDraft) -> bool:
        """Pages for all that decodes and for the share of the best, by array operations.

        Returns: False, and nothing is done, if there are not enough.
        """
        pool, table, seats = self.pool, self._table, self.running.seats(draft.version)
        num_scheduled, is_far = table.num_scheduled[seats], table.is_far[seats]
        can_draw = ~is_far & (num_scheduled + 1 < table.max_total[seats])
        can_draw &= ~table.must_be_read(seats)
        decoding = seats[can_draw]
        growing = table.sequences(decoding[num_scheduled[can_draw] >= table.room[decoding]])
        far = table.sequences(seats[is_far])
        budget = draft.budget - (len(seats) - len(far))
        end = far[0].num_scheduled_tokens + _share(far[0], budget) if far else 0
        if len(growing) + (self._num_short(far[0], end) if far else 0) > pool.num_available:
            return False
        for sequence, page in zip(growing, pool.allocate(len(growing)), strict=True):
            table.add_pages(sequence, [page])
        if far:
            self._take_pages(far[0], end)
        draft.budget, draft.decoding, draft.far = budget, decoding, far
        return True

    def _decode_by_rank(self, draft: StepDraft) -> None:
        """The same where pages are short: sequence by sequence, the best one first."""
        decoding: list[int] = []
        is_far = self._table.is_far[self.running.seats(draft.version)]
        draft.budget -= int(np.count_nonzero(~is_far))
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or sequence.version != draft.version:
                continue  # it gave way to one before it, or it is not its turn
            if sequence.num_behind > 1:
                if not draft.far:
                    self._grow(sequence, _share(sequence, draft.budget), draft)
                draft.far.append(sequence)
                continue
            can_draw = sequence.num_tokens < sequence.max_total_tokens
            can_draw &= not self._table.must_be_read(sequence.seat)
            if can_draw and self._grow(sequence, 1, draft):
                decoding.append(sequence.seat)
        draft.far = [s for s in draft.far if s.status is Status.RUNNING]
        draft.decoding = np.array(decoding, np.intp)

    def _grow(self, sequence: Sequence, length: int, draft: StepDraft) -> int:
        """Gets pages for so many more tokens, or for as many as it can; returns how many."""
        start = sequence.num_scheduled_tokens
        is_full = start == len(sequence.page_table) * self.pool.page_size
        while is_full and not self.pool.num_available:
            worse = self.running.giving_way_to(sequence)
            if worse is None:
                break
            draft.gave_way.append(worse)
            draft.budget += worse.version == draft.version and worse.num_behind == 1
            self._seating.preempt(worse)
        return self._take_pages(sequence, start + length) - start

    def _take_pages(self, sequence: Sequence, end: int) -> int:
        """Free pages up to token `end`; returns where they end."""
        num_pages = min(self._num_short(sequence, end), self.pool.num_available)
        self._table.add_pages(sequence, self.pool.allocate(num_pages))
        return min(end, len(sequence.page_table) * self.pool.page_size)

    def _num_short(self, sequence: Sequence, end: int) -> int:
        """Pages that it lacks up to token `end`."""
        return max(0, self.pool.pages_for(end) - len(sequence.page_table))

    def _compute_chunks(self, draft: StepDraft, now: float) -> None:
        """Gives what is left of the budget to those that run and those that wait, in turn.

        Pages are only taken here, by whoever runs: a start leaves what better ones need.
        """
        best = self._best(draft, now)
        share = 0 if best is None else _share(best, draft.budget)
        draft.budget -= share
        for sequence in sorted(draft.far, key=_by_turn):
            self._start_before(sequence.turn, draft, now)
            if sequence is best:
                draft.budget += share
            if sequence.status is Status.RUNNING:  # it may have given way to a start
                self._go_on(sequence, draft)
        self._start_before(None, draft, now)

    def _best(self, draft: StepDraft, now: float) -> Sequence | None:
        """Whose the share is: of those with more to compute the best rank, if it has a seat."""
        best, waiting = draft.far[0] if draft.far else None, self._waiting.best
        if waiting is None or (best is not None and best.rank < waiting.rank):
            return best
        if not self._seating.start(waiting, draft, draft.budget, now):
            return best
        draft.far.append(waiting)
        return waiting

    def _start_before(self, turn: Turn | None, draft: StepDraft, now: float) -> None:
        """Starts those whose turn is before, while there are tokens, seats and pages."""
        while draft.budget > 0 and (first := self._seating.next(draft, turn)) is not None:
            if self._seating.start(first, draft, draft.budget, now):
                self._go_on(first, draft)

    def _go_on(self, sequence: Sequence, draft: StepDraft) -> None:
        """A chunk of its tokens, as far as there are tokens of the budget and pages."""
        start = sequence.num_scheduled_tokens
        end = start + min(sequence.num_behind, draft.budget)
        length = self._take_pages(sequence, end) - start
        if length <= 0:
            return
        draft.others.append(sequence)
        draft.num_new.append(length)
        draft.budget -= length
        draft.has_chunks |= sequence.num_behind > 1
        draft.filling |= self.pool.digests_filled(sequence, start, start + length)


def _share(sequence: Sequence, budget: int) -> int:
    """Tokens that are kept for the best rank."""
    return min(sequence.num_behind, max(1, budget // SHARE_OF_BEST))
