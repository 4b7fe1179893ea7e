"""What holds of a scheduler, its pool and the device between any two events.

`Scheduler.check_integrity` is the first of the laws; the others need to know what pages hold and
what each sequence says alone.
"""

from __future__ import annotations

from collections import Counter

from jaxinfer.scheduling.prefix_index import NO_PARENT
from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.ghosts import law, solo
from tests.scheduling.world import World, is_new


def check(world: World) -> None:
    """Raises: AssertionError that names the law."""
    world.scheduler.check_integrity()
    _check_pages(world)
    _check_index(world)
    for sequence in world.live:
        if sequence.status is Status.RUNNING:
            _check_running(world, sequence)
        else:
            _check_waiting(world, sequence)
    _check_queues(world)
    _check_seats(world)
    _check_formation(world)
    _check_retries(world)
    if not world.live:
        law(world.scheduler.pool.num_used == 0, "when all is done no page is used")


def _check_pages(world: World) -> None:
    """Each page is free, cached or used; one that is not indexed is in one page table, once."""
    pool = world.scheduler.pool
    total = pool.num_free + pool.num_cached + pool.num_used
    law(total == pool.num_pages, "free + cached + used is all")
    owned = Counter(page for s in world.live for page in s.page_table)
    law(pool.num_used == len(owned), "used pages are those of page tables")
    shared = [page for page, owners in owned.items() if owners > 1]
    law(all(page in pool.index for page in shared), "a page of two is indexed")
    stats = world.scheduler.stats()
    counted = (stats.pages_free, stats.pages_cached, stats.pages_used)
    law(counted == (pool.num_free, pool.num_cached, pool.num_used), "stats count the pages")


def _check_index(world: World) -> None:
    """An indexed page holds what its entry says, written by steps that have been read."""
    pool, device = world.scheduler.pool, world.device
    unread = min((flight.number for flight in world.flights), default=world.num_steps)
    ends: dict[int, int] = {}
    for page, entry in pool.index._entries.items():  # parents are older than their children
        slots = device.slots[page]
        writers = [step for _, step in slots]
        law(max(writers) < unread, "a page is indexed when its steps have been read")
        law(min(writers) >= 0, "a page is indexed when it is full")
        ghost = hash(entry.salt) if entry.parent == NO_PARENT else ends[entry.parent]
        tokens = memoryview(entry.tokens).cast("i")
        for (held, _), token in zip(slots, tokens, strict=True):
            ghost = hash((ghost, token))
            law(held == ghost, "an indexed page holds what its entry says")
        ends[page] = ghost


def _check_running(world: World, sequence: Sequence) -> None:
    pool, alone = world.scheduler.pool, solo(sequence)
    scheduled, computed = sequence.num_scheduled_tokens, sequence.num_computed_tokens
    pages, known = sequence.page_table, len(sequence.token_ids)
    under_way = _under_way(world, sequence)
    law(scheduled - computed == sum(length for length, _ in under_way), "counters know the steps")
    num_drawn = sum(is_sampled for _, is_sampled in under_way)
    law(num_drawn == max(0, scheduled + 1 - known), "each token on its way is in one step")
    law(scheduled < sequence.max_total_tokens, "nothing is scheduled past the end")
    law(scheduled <= len(pages) * pool.page_size, "scheduled tokens have pages")
    law(len(pages) <= pool.pages_for(sequence.max_total_tokens - 1), "no page is past the end")
    held = world.device.read(pages, scheduled)
    law(held == list(alone.ghosts[:scheduled]), "pages hold the sequence's own tokens")
    num_indexed = sequence.num_indexed_pages
    law(all(page in pool.index for page in pages[:num_indexed]), "its first pages are indexed")
    if pool.enable_prefix_caching and sequence.is_indexable:
        law(num_indexed == computed // pool.page_size, "full pages are indexed when read")
    rest = pages[num_indexed:]
    law(not any(page in pool.index for page in rest), "no other page of it is indexed")


def _under_way(world: World, sequence: Sequence) -> list[tuple[int, bool]]:
    """Of each step under way that counts for the sequence: its tokens, and whether it draws."""
    sitting = world.scheduler._table.sitting[sequence.seat]
    found: list[tuple[int, bool]] = []
    for flight in world.flights:
        step = flight.scheduled
        if sequence in step.sequences:
            row = step.sequences.index(sequence)
            if step.sittings[row] == sitting:
                found.append((int(step.rows.num_new[row]), sequence in step.sampled))
    return found


def _check_waiting(world: World, sequence: Sequence) -> None:
    counters = (sequence.num_scheduled_tokens, sequence.num_computed_tokens)
    law(not sequence.page_table and counters == (0, 0), "only a running one holds pages")
    law(sequence.seat == -1, "only a running one has a seat")
    is_last = sequence.num_retries == world.setup.max_retries > 0
    queue = world.scheduler._retries.waiting if is_last else world.scheduler._waiting
    law((sequence in queue) is (sequence.status is not Status.PAUSED), "what does not run waits")
    is_drawn = any(
        sequence in flight.scheduled.sampled and sequence not in flight.lost
        for flight in world.flights
    )
    law(sequence.is_awaited == is_drawn, "a preempted one awaits the token on its way")


def _check_queues(world: World) -> None:
    scheduler, live = world.scheduler, world.live
    law(list(scheduler.running) == world.running, "the running are in the order of their rank")
    num_paused = sum(s.status is Status.PAUSED for s in live)
    num_waiting = len(live) - len(scheduler.running) - num_paused
    stats = scheduler.stats()
    law(stats.num_waiting == num_waiting, "who is live runs or waits")
    law(stats.num_paused == num_paused, "the paused are counted")
    waiting = [s for s in live if s in scheduler._waiting]
    if waiting:
        best, first = scheduler._waiting.best, scheduler._waiting.next
        law(best is min(waiting, key=lambda s: s.rank), "the best waits in front")
        law(first is min(waiting, key=lambda s: s.turn), "the first in turn waits in front")
    on_trial = [s for s in live if s in scheduler._retries.waiting]
    if on_trial:
        first = scheduler._retries.waiting.peek()
        is_best = first is not None and first[1] is min(on_trial, key=lambda s: s.rank)
        law(is_best, "the best has its trial first")
    dated = {s for s in live if s.request.deadline_s is not None}
    heap = scheduler._deadlines
    law(len(heap) == len(dated) and all(s in heap for s in dated), "deadlines are of the living")
    heap = scheduler._queue_deadlines
    dated = {s for s in waiting if s.request.queue_deadline_s is not None and is_new(s)}
    law(all(s in heap for s in dated), "who is new has its queue deadline")
    law(set(heap._ticket_of) <= set(live), "queue deadlines are of the living")
    under_way = [flight.scheduled for flight in world.flights]
    law(list(scheduler._under_way._steps) == under_way, "steps are under way in their order")


def _check_seats(world: World) -> None:
    """Each running sequence has a seat of its own; the device has the newest token of some."""
    table = world.scheduler._table
    seats = [s.seat for s in world.scheduler.running]
    law(sorted(seats + table._free) == list(range(len(table.page_table))), "a seat has one sitter")
    for sequence in world.scheduler.running:
        seat, at = sequence.seat, sequence.num_scheduled_tokens
        if table.has_drawn[seat]:
            alone = solo(sequence)
            newest = (alone.ghosts[at - 1], alone.tokens[at])
            law(world.device.newest[seat] == newest, "a seat holds the newest token")


def _check_retries(world: World) -> None:
    """Nobody begins again more often than it may, and those that do are kept in mind."""
    retries, live = world.scheduler._retries, world.live
    law(all(s.num_retries <= world.setup.max_retries for s in live), "retries are bounded")
    law(retries._counted == {s for s in live if s.num_retries}, "retries are of the living")


def _check_formation(world: World) -> None:
    """What the next decode step would take over from the last one is still so."""
    table, last = world.scheduler._table, world.scheduler._builder._last
    if last is not None and (last.num_sat, last.num_writes) == (table.num_sat, table.num_writes):
        seats, pages = last.rows.seats, last.batch.page_table
        is_fresh = (pages[: len(seats)] == table.page_table[seats]).all()
        law(bool(is_fresh), "page tables that are used again are fresh")
