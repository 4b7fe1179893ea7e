"""Who sits down to run, on which pages, and who stands up for it.

Host only: no JAX, and no tokens: how much of a sequence is computed in a step is the scheduler's.
"""

from __future__ import annotations

from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.rank import Turn
from jaxinfer.scheduling.running import Running, by_class
from jaxinfer.scheduling.scheduled import StepDraft
from jaxinfer.scheduling.sequence import Sequence, Status
from jaxinfer.scheduling.steps_under_way import StepsUnderWay
from jaxinfer.scheduling.waiting import Waiting

MAX_HELD = 16  # sequences that may be held back for a page in one step
MAX_GIVING_WAY = 4  # sequences that may be preempted in one step for others to start


class Seating:
    """Moves sequences between `waiting` and `running`.

    Args:
        num_seats: that may run at once.
    """

    def __init__(
        self,
        pool: PagePool,
        waiting: Waiting,
        running: Running,
        under_way: StepsUnderWay,
        num_seats: int,
    ):
        self._pool, self._waiting, self._running = pool, waiting, running
        self._under_way = under_way
        self._num_seats = num_seats
        self.num_preemptions = 0  # all since start
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    def next_version(self) -> str | None:
        """The version of the best that waits, if it may find a seat."""
        best = self._waiting.best
        has_seat = best is not None and (self._is_seat_free() or self._is_better_class(best))
        return best.version if best is not None and has_seat else None

    def next(self, draft: StepDraft, turn: Turn | None) -> Sequence | None:
        """Who tries to start now: the first in turn, if that is before `turn`; None: nobody.

        Nobody starts past one of a better rank that found no pages, or whose turn it is in the
        step of another version, or that was preempted: that one comes first, and if its token is
        on its way it lets nobody past until that is read. A worse one would take the pages that it
        resumes on.
        """
        best, first = self._waiting.best, self._waiting.next
        if draft.is_closed or len(draft.held) >= MAX_HELD or best is None or first is None:
            return None
        if best.status is Status.PREEMPTED:
            first = best
        elif first is not best and not (
            best.version == draft.version and self._may_find_pages(best)
        ):
            return None
        return None if turn is not None and first.turn > turn else first

    def start(self, sequence: Sequence, draft: StepDraft, budget: int, now: float) -> bool:
        """Starts or resumes a sequence to compute up to `budget` tokens in this step.

        Returns: False if it is held back, or if it finds no room. Then nobody more starts in this
            step. One is held back when its next page is being computed, in this very step or in
            one under way, to find it in the prefix index. That can not go on for ever: each time,
            one more of its pages is computed.
        """
        draft.is_closed = not self._may_start(sequence, draft)
        if draft.is_closed:
            return False
        pages = self._pool.match(sequence)
        digest = self._pool.next_digest(sequence, len(pages))
        if digest in draft.filling or self._under_way.is_filling(digest):
            self._waiting.remove(sequence)
            draft.held.append(sequence)
            return False
        num_hit = len(pages) * self._pool.page_size
        length = max(1, min(sequence.num_tokens - num_hit, budget))
        num_pages, num_spare = self._num_pages(sequence, num_hit + length)
        draft.is_closed = not self._make_room(sequence, pages, num_pages + num_spare, draft)
        if not draft.is_closed:
            self._sit(sequence, pages, num_pages, now)
        return not draft.is_closed

    def start_alone(self, sequence: Sequence, budget: int, now: float) -> None:
        """Starts a sequence that fits alone, whoever has to give way."""
        while True:
            pages = self._pool.match(sequence)
            num_hit = len(pages) * self._pool.page_size
            length = max(1, min(sequence.num_tokens - num_hit, budget))
            num_pages, num_spare = self._num_pages(sequence, num_hit + length)
            wanted = num_pages + num_spare - len(pages) + self._pool.num_idle(pages)
            if self._is_seat_free() and wanted <= self._pool.num_available:
                break
            self.preempt(max(self._running, key=by_class))
        self._sit(sequence, pages, num_pages, now)

    def take_over(self, before: Seating) -> None:
        """Counts on from the totals of one that is given up."""
        self.num_preemptions = before.num_preemptions
        self.num_query_tokens = before.num_query_tokens
        self.num_hit_tokens = before.num_hit_tokens

    def put_back(self, draft: StepDraft) -> None:
        """Those that were held back wait again."""
        for sequence in draft.held:
            self._waiting.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """It gives seat and pages back, and waits."""
        self.stop(sequence)
        sequence.status = Status.PREEMPTED
        sequence.num_pages_wanted = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.enter(sequence)

    def stop(self, sequence: Sequence, *, is_failed: bool = False) -> None:
        """A running sequence gives its seat and its pages back."""
        pages = self._running.stop(sequence)
        if is_failed:
            self._pool.forget(pages)
        self._pool.release(pages)

    def _is_seat_free(self) -> bool:
        return len(self._running) < self._num_seats

    def _is_better_class(self, sequence: Sequence) -> bool:
        return sequence.request.priority < self._running.lowest_class

    def _may_find_pages(self, sequence: Sequence) -> bool:
        """As far as it knows since it last tried."""
        return sequence.num_pages_wanted + self._reserve(
            sequence
        ) <= self._pool.num_available or self._is_better_class(sequence)

    def _may_start(self, sequence: Sequence, draft: StepDraft) -> bool:
        """What can be said before its pages are looked at."""
        return (
            sequence.version == draft.version
            and not sequence.is_awaited
            and sequence not in draft.gave_way
            and (self._is_seat_free() or self._is_better_class(sequence))
            and self._may_find_pages(sequence)
        )

    def _num_pages(self, sequence: Sequence, end: int) -> tuple[int, int]:
        """Pages for its tokens up to `end`, and of those behind that have to be there.

        One that resumes takes the pages of all its tokens, and needs to see one more.
        """
        pages_for = self._pool.pages_for
        if sequence.status is not Status.PREEMPTED:
            return pages_for(end), 0
        num_pages = pages_for(sequence.num_tokens)
        return num_pages, int(num_pages < pages_for(sequence.max_total_tokens - 1))

    def _reserve(self, sequence: Sequence) -> int:
        """Pages that its start must leave: for those that run to go on for a while, and what the
        prompts of a better rank that are under way still need.
        """
        pool, running = self._pool, self._running
        needed = [
            max(0, pool.pages_for(s.num_tokens) - len(s.page_table))
            for s in running.far()
            if s.rank < sequence.rank
        ]
        return min(len(running), pool.num_pages // 8) + sum(needed)

    def _make_room(
        self, sequence: Sequence, matched: list[int], num_pages: int, draft: StepDraft
    ) -> bool:
        """Whether there are a seat and pages for it; others may have to give way."""
        wanted = num_pages - len(matched) + self._pool.num_idle(matched)
        shortage = wanted + self._reserve(sequence) - self._pool.num_available
        if shortage <= 0 and self._is_seat_free():
            return True
        giving_way = self._giving_way(sequence, matched, shortage, draft)
        if not giving_way and shortage > 0:
            sequence.num_pages_wanted = wanted
        for each in giving_way:
            is_near = each.version == draft.version and each.num_behind == 1
            if is_near:
                draft.drop(each)
            draft.gave_way.append(each)
            self.preempt(each)
        return bool(giving_way)

    def _giving_way(
        self, sequence: Sequence, matched: list[int], shortage: int, draft: StepDraft
    ) -> list[Sequence]:
        """Whom to preempt for it: a worse class and a worse rank, and only if that is enough.

        Nobody gives way again before it has drawn a token since, nor in a step that has a chunk of
        it.
        """
        able = [
            each
            for each in self._running.worse(sequence)
            if each.request.priority > sequence.request.priority
            and (each.num_preemptions == 0 or self._running.has_drawn(each))
            and each not in draft.others
        ]
        found: list[Sequence] = []
        for each in sorted(able, key=by_class, reverse=True):
            if len(draft.gave_way) + len(found) >= MAX_GIVING_WAY:
                break
            found.append(each)
            shortage -= self._pool.num_own(set(each.page_table) - set(matched))
            if shortage <= 0:
                return found
        return []

    def _sit(self, sequence: Sequence, matched: list[int], num_pages: int, now: float) -> None:
        pool, num_hit = self._pool, len(matched) * self._pool.page_size
        pool.share(matched)
        sequence.page_table = matched + pool.allocate(num_pages - len(matched))
        sequence.num_indexed_pages = len(matched)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now
            sequence.num_cached_tokens = num_hit
            self.num_hit_tokens += num_hit
            self.num_query_tokens += sequence.num_tokens if pool.enable_prefix_caching else 0
        self._waiting.remove(sequence)
        self._running.start(sequence, num_hit)
