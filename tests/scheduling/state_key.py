"""What makes two worlds one state.

The key holds all that the future depends on, with pages named by what they hold or by their place
in a page table, so that a permutation of page ids or seats is the same state. Counters that only
count (steps, preemptions) are not in it. `exploration` samples worlds that were merged, and goes on
from them to see that they really have one future.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.world import Flight, World

Names = Callable[[Any], tuple[Any, ...]]


def state_key(world: World) -> int:
    """A hash of all that the future depends on."""
    scheduler, pool = world.scheduler, world.scheduler.pool
    names = {id(s): (name, s.index) for name, each in world.sequences.items() for s in each}

    def named(sequences: Any) -> tuple[Any, ...]:
        return tuple([names[id(s)] for s in sequences])

    def page_name(page: int) -> int:
        return world.device.slots[page][-1][0] if page in pool.index else 0

    live = sorted(world.live, key=lambda s: s.rank)
    by_deadline = [s for s in live if s.request.deadline_s is not None]
    turns = scheduler._turns
    num_turns, last_turns = turns._num_turns, sorted(turns._last_turn.values())
    return hash(
        (
            tuple(world.sequences),
            world.version,
            world.now,
            tuple(world.passed.items()),
            tuple(world.shares.items()),
            tuple(world.since.items()),
            named(live),
            tuple([_sequence_key(s, page_name) for s in live]),
            tuple([page_name(page) for page in pool._cached]),
            pool.num_free,
            named(sorted(by_deadline, key=lambda s: s.request.deadline_s or 0.0)),
            tuple([_flight_key(scheduler, flight, named) for flight in world.flights]),
            _formation_key(scheduler, named),
            tuple(turns.num_running),
            tuple([(v, last_turns.index(turn)) for v, turn in turns._last_turn.items()]),
            tuple([num_turns - turn for turn in turns._last_turn.values() if turn > num_turns - 4]),
            tuple(turns._leads.items()),
        )
    )


def _sequence_key(sequence: Sequence, page_name: Callable[[int], int]) -> tuple[Any, ...]:
    return (
        sequence.status.value,
        sequence.version,
        len(sequence.token_ids),
        sequence.num_scheduled_tokens,
        sequence.num_computed_tokens,
        sequence.num_indexed_pages,
        tuple([page_name(page) for page in sequence.page_table]),
        sequence.num_pages_wanted,
        sequence.turn[0] if _has_turn(sequence) else 0,
        sequence.num_preemptions == 0,
        sequence.is_indexable,
        sequence.is_awaited,
        sequence.table is not None and bool(sequence.table.has_drawn[sequence.seat]),
        sequence.first_token_s is None,
        sequence.first_scheduled_s is None,
        sequence.num_retries,
        0 if sequence.num_output_tokens else sequence.num_proven_tokens,
    )


def _has_turn(sequence: Sequence) -> bool:
    """Whether it may still come in its turn; who is resumed or preempted gets another."""
    if sequence.table is None:
        return sequence.status is not Status.PAUSED
    return sequence.num_behind > 1


def _flight_key(scheduler: Scheduler, flight: Flight, named: Names) -> tuple[Any, ...]:
    step = flight.scheduled
    return (
        step.batch.kind,
        step.batch.version,
        named(step.sequences),
        step.rows.num_new.tobytes(),
        named(step.sampled),
        named(step.firsts),
        (scheduler._table.sitting[step.rows.seats] == step.sittings).tobytes(),
        step.filling,
    )


def _formation_key(scheduler: Scheduler, named: Names) -> Any:
    """Who is in the decode step that the next one may take over from, and what it may take."""
    table, last = scheduler._table, scheduler._builder._last
    if last is None or last.num_sat != table.num_sat:
        return None
    orders = [[table._sequences[at] for at in seats] for seats in (last.given, last.rows.seats)]
    return None not in orders[0] and (*map(named, orders), last.num_writes == table.num_writes)
