"""Which sequences run next, and on which pages.

Host only: no JAX. Time is an argument. There are no phases: a sequence is behind
(num_scheduled_tokens < num_tokens) or not.

Order. `rank` = (arrival_s + priority * AGING_S, number of submission); smaller is better, and it
never changes. So inside a class it is first come, first served, and a sequence of class p waits
behind those of a better class q only if they arrived less than (p - q) * AGING_S seconds after it:
that is the bound of its starvation.

Progress. Running sequences get pages in the order of their rank. One that finds none takes them
from the worst running sequence, if that is worse than itself; else it skips the step and keeps
what it has. So the best one runs in every step (submission has checked that it fits alone), and
what is preempted was preempted by progress of a better one. It resumes only when the pages of all
its tokens are there at once, with a page to go on. A step computes with one version of the
weights; versions that have work take turns.

Pipelining. `schedule` may be called before the step before has been read (`update`), and counts on
what that step will do: its tokens are in KV, its draws are drawn. Where it turns out otherwise (the
sequence has stood up since) the work done for it is dropped. Steps run in the order of their
dispatch, so pages may change hands at once. Only `update` indexes pages for reuse. A sequence with
a grammar draws when its last token was read, for that says which may come next: it sits out the
step between, in which the others go on.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.config import SchedulerConfig
from jaxinfer.errors import ConfigError
from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.batch_builder import BatchBuilder
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.length_limit import LengthLimit
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.running import Running
from jaxinfer.scheduling.running_table import RunningTable
from jaxinfer.scheduling.scheduled import Scheduled, StepDraft
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.sequence_heap import SequenceHeap
from jaxinfer.scheduling.steps_under_way import StepsUnderWay
from jaxinfer.scheduling.version_turns import VersionTurns
from jaxinfer.stats import PoolStats

AGING_S = 30.0  # a class is worth this much waiting
MAX_HELD = 16  # sequences that may be held back for a page in one step


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
        self._max_tokens = config.max_num_batched_tokens
        # One token of every step is left for a chunk, so no more run than there are tokens.
        self._num_seats = min(config.max_num_seqs, self._max_tokens)
        self._table = RunningTable(self._num_seats, buckets.max_pages_per_seq, pool.page_size)
        self._builder = BatchBuilder(buckets, self._table)
        self._turns = VersionTurns()
        self.running = Running(self._table, self._turns)
        self._under_way = StepsUnderWay(pool, self._table)
        self._waiting = SequenceHeap()
        self._deadlines = SequenceHeap()
        self._by_request: dict[str, list[Sequence]] = {}
        self._num_submitted = 0
        self._num_preemptions = 0
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    def has_work(self) -> bool:
        return bool(self.running) or len(self._waiting) > 0

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence.

        Raises: ContextLengthExceeded if it could never fit.
        """
        request = sequence.request
        sequence.max_total_tokens = self.limit.total_tokens(
            sequence.num_prompt_tokens, request.sampling.max_tokens
        )
        self._num_submitted += 1
        sequence.rank = (request.arrival_s + request.priority * AGING_S, self._num_submitted)
        self._by_request.setdefault(request.request_id, []).append(sequence)
        self._waiting.push(sequence.rank, sequence)
        if request.deadline_s is not None:
            self._deadlines.push(request.deadline_s, sequence)

    def schedule(self, now: float) -> Scheduled | None:
        """The next step, with pages for all that it computes; None if nothing can run.

        The caller gives it to `update` or `discard`, in the order of the calls.
        """
        first = self._waiting.peek() if len(self.running) < self._num_seats else None
        for version in self._turns.order(first and first[1].version):
            draft = StepDraft(self._max_tokens, version)
            if not self._schedule_at_once(draft):
                self._schedule_by_rank(draft)
            self._start_waiting(draft, now)
            if not draft.is_empty:
                self._turns.take(version)
                return self._dispatched(draft)
        return None

    def update(self, scheduled: Scheduled, result: StepResult, now: float) -> list[Sequence]:
        """Takes over what a step computed and drew, and indexes the pages that it filled.

        Returns: the sequences whose logits were not numbers; the caller fails them. They got no
            token, and no page of this step of theirs is indexed.
        """
        return self._under_way.read(scheduled, result, now)

    def discard(self, scheduled: Scheduled) -> None:
        """Forgets a step that failed; the caller fails its sequences."""
        self._under_way.discard(scheduled)

    def discard_all(self) -> None:
        """Forgets all steps under way: their device is lost, and so are their tokens."""
        self._under_way.clear()

    def finish(self, sequence: Sequence, *, is_failed: bool = False) -> None:
        """Ends a sequence in any state; its pages are free when this returns.

        Args:
            is_failed: its KV is not to be trusted, so what only it owns leaves the prefix index.
        """
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence, is_failed=is_failed)
        self._waiting.remove(sequence)
        self._deadlines.remove(sequence)
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

    def expire(self, now: float) -> list[Sequence]:
        """Ends the sequences whose deadline has passed, and returns them."""
        expired: list[Sequence] = []
        while (first := self._deadlines.peek()) is not None and first[0] < now:
            expired.append(first[1])
            self.finish(first[1])
        return expired

    def stats(self) -> PoolStats:
        return PoolStats(
            num_running=len(self.running),
            num_waiting=len(self._waiting),
            pages_total=self.pool.num_pages,
            pages_used=self.pool.num_used,
            pages_cached=self.pool.num_cached,
            pages_free=self.pool.num_free,
            num_preemptions=self._num_preemptions,
            prefix_query_tokens=self._num_query_tokens,
            prefix_hit_tokens=self._num_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Raises: AssertionError if pages, owners, queues or the running table disagree."""
        self.pool.check_integrity(s.page_table for s in self.running)
        self.running.check_integrity()
        live = sum(len(choices) for choices in self._by_request.values())
        assert live == len(self.running) + len(self._waiting), f"{live} sequences are live"

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

    def _schedule_at_once(self, draft: StepDraft) -> bool:
        """All that runs, by array operations; False, and nothing done, if pages are short."""
        pool, table, seats = self.pool, self._table, self.running.seats(draft.version)
        num_scheduled, is_far = table.num_scheduled[seats], table.is_far[seats]
        can_draw = ~is_far & (num_scheduled + 1 < table.max_total[seats])
        can_draw &= ~table.must_be_read(seats)
        decoding = seats[can_draw]
        growing = table.sequences(decoding[num_scheduled[can_draw] >= table.room[decoding]])
        draft.budget -= len(seats) - int(np.count_nonzero(is_far))
        chunks = self._chunks(table.sequences(seats[is_far]), draft.budget)
        num_pages = [
            max(0, pool.pages_for(s.num_scheduled_tokens + n) - len(s.page_table))
            for s, n in chunks
        ]
        if len(growing) + sum(num_pages) > pool.num_available:
            return False
        for sequence, page in zip(growing, pool.allocate(len(growing)), strict=True):
            table.add_pages(sequence, [page])
        for (sequence, length), number in zip(chunks, num_pages, strict=True):
            table.add_pages(sequence, pool.allocate(number))
            self._add_chunk(draft, sequence, length)
        draft.decoding = decoding
        return True

    @staticmethod
    def _chunks(sequences: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """What each computes of its tokens while the budget lasts."""
        chunks: list[tuple[Sequence, int]] = []
        for sequence in sequences:
            length = min(sequence.num_behind, budget)
            if length <= 0:
                break
            chunks.append((sequence, length))
            budget -= length
        return chunks

    def _add_chunk(self, draft: StepDraft, sequence: Sequence, length: int) -> None:
        start = sequence.num_scheduled_tokens
        draft.others.append(sequence)
        draft.num_new.append(length)
        draft.budget -= length
        draft.has_chunks |= sequence.num_behind > 1
        draft.filling |= self.pool.digests_filled(sequence, start, start + length)

    def _schedule_by_rank(self, draft: StepDraft) -> None:
        """The same where pages are short: sequence by sequence, the best one first."""
        decoding: list[int] = []
        is_far = self._table.is_far[self.running.seats(draft.version)]
        draft.budget = self._max_tokens - int(np.count_nonzero(~is_far))
        for sequence in self.running:  # may lose members at its end meanwhile
            if sequence.version != draft.version:
                continue
            is_far = sequence.num_behind > 1
            if not is_far and sequence.num_tokens >= sequence.max_total_tokens:
                continue
            if self._table.must_be_read(sequence.seat):
                continue
            length = min(sequence.num_behind, draft.budget) if is_far else 1
            end = sequence.num_scheduled_tokens + length
            if end > len(sequence.page_table) * self.pool.page_size:
                length = self._grow(sequence, end)
            if length <= 0:
                continue
            if is_far:
                self._add_chunk(draft, sequence, length)
            else:
                decoding.append(sequence.seat)
        draft.decoding = np.array(decoding, np.intp)

    def _grow(self, sequence: Sequence, end: int) -> int:
        """Gets pages up to token `end`, or as far as there are any; returns the tokens that fit."""
        pool, start = self.pool, sequence.num_scheduled_tokens
        is_full = start == len(sequence.page_table) * pool.page_size
        while is_full and not pool.num_available and self.running.worst is not sequence:
            self._preempt(self.running.worst)
        num_pages = min(pool.pages_for(end) - len(sequence.page_table), pool.num_available)
        self._table.add_pages(sequence, pool.allocate(num_pages))
        return min(end, len(sequence.page_table) * pool.page_size) - start

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.status = Status.PREEMPTED
        sequence.num_pages_wanted = 0
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push(sequence.rank, sequence)

    def _stop_running(self, sequence: Sequence, *, is_failed: bool = False) -> None:
        pages = self.running.stop(sequence)
        if is_failed:
            self.pool.forget(pages)
        self.pool.release(pages)

    def _may_start(self) -> bool:
        """Whether a waiting sequence could find a seat and, as far as it knows, its pages."""
        if len(self.running) >= self._num_seats:
            return False
        first = self._waiting.peek()
        return first is not None and (
            first[1].num_pages_wanted + self._reserve() <= self.pool.num_available
        )

    def _start_waiting(self, draft: StepDraft, now: float) -> None:
        """Starts waiting sequences in the order of their rank, until one finds no room.

        One whose next page is being computed, in this very step or in one under way, is held back,
        to find it in the prefix index. That can not go on for ever: each time, one more of its
        pages is computed. One that was preempted with a token on its way lets nobody past until the
        token is read: a worse one would take the pages that it resumes on.
        """
        pool, held = self.pool, list[Sequence]()
        while draft.budget > 0 and len(held) < MAX_HELD and self._may_start():
            sequence = self._waiting.first()
            if sequence.version != draft.version or sequence.is_awaited:
                break
            pages = pool.match(sequence)
            digest = pool.next_digest(sequence, len(pages))
            is_filled = digest in draft.filling or self._under_way.is_filling(digest)
            if is_filled:
                self._waiting.remove(sequence)
                held.append(sequence)
            elif not self._start(sequence, pages, draft, now):
                break
        for sequence in held:
            self._waiting.push(sequence.rank, sequence)

    def _start(self, sequence: Sequence, pages: list[int], draft: StepDraft, now: float) -> bool:
        """Starts or resumes a sequence behind its matched pages, if there are pages for it."""
        pool, num_tokens = self.pool, sequence.num_tokens
        num_hit = len(pages) * pool.page_size
        length = min(num_tokens - num_hit, draft.budget)
        num_pages = pool.pages_for(num_hit + length)
        wanted = num_pages
        if sequence.status is Status.PREEMPTED:
            num_pages = pool.pages_for(num_tokens)
            wanted = min(num_pages + 1, pool.pages_for(sequence.max_total_tokens - 1))
        wanted += pool.num_idle(pages) - len(pages)
        if wanted + self._reserve() > pool.num_available:
            sequence.num_pages_wanted = wanted
            return False
        pool.share(pages)
        sequence.page_table = pages + pool.allocate(num_pages - len(pages))
        sequence.num_indexed_pages = len(pages)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now
            sequence.num_cached_tokens = num_hit
            self._num_hit_tokens += num_hit
            self._num_query_tokens += num_tokens if pool.enable_prefix_caching else 0
        self._waiting.remove(sequence)
        self.running.start(sequence, num_hit)
        self._add_chunk(draft, sequence, length)
        return True

    def _reserve(self) -> int:
        """Pages that a start must leave, for those that run to go on for a while.

        (Running prompts need none of them: with tokens left to start another, they have their
        pages for all their tokens.)
        """
        return min(len(self.running), self.pool.num_pages // 8)
