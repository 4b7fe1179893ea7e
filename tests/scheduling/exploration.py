"""Every state that a small scheduler can reach, by every order of events.

Breadth first over Worlds, so that the way to a broken law is a shortest one. Worlds with one
`state_key` are one state.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.laws import check
from tests.scheduling.snapshots import Snapshots
from tests.scheduling.state_key import state_key
from tests.scheduling.world import MAX_UNDER_WAY, Setup, World, has_deadline

Event = tuple[str, ...]  # a name and, of some, a request_id
DISTURBANCES = frozenset(
    (
        *("end", "not a number", "abort", "expire", "new version"),
        *("fail dispatch", "fail read", "lose pool"),
    )
)
SHARES = frozenset(("new version", "equal shares"))
PAUSES = frozenset(("pause", "resume"))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is explored.

    Args:
        requests: each is submitted once, at any time.
        names: of the events that may happen, beside `submit`, `schedule` and `read`.
    """

    setup: Setup
    requests: tuple[Request, ...]
    names: frozenset[str]

    def events(self, world: World) -> Iterator[Event]:
        """All that can happen next."""
        submitted = world.sequences
        for request in self.requests:
            if request.request_id not in submitted:
                yield ("submit", request.request_id)
        if world.scheduler.has_work() and len(world.flights) < MAX_UNDER_WAY:
            yield ("schedule",)
            yield from self._if_planned("fail dispatch")
        if world.flights:
            yield ("read",)
            yield from self._if_planned("fail read")
            yield from self._if_planned("lose pool")
            for sequence in world.flights[0].scheduled.sampled:
                if sequence.status is not Status.FINISHED:
                    yield from self._if_planned("end", sequence)
                    yield from self._if_planned("not a number", sequence)
        for sequence in world.live:
            yield from self._if_planned("abort", sequence)
            if sequence.status is Status.PAUSED:
                yield from self._if_planned("resume", sequence)
            elif len(world.flights) < MAX_UNDER_WAY:
                yield from self._if_planned("pause", sequence)
        if any(has_deadline(s) for s in world.live):
            yield from self._if_planned("expire")
        if world.version == "v1" and 0 < len(submitted) < len(self.requests):
            yield from self._if_planned("new version")
        if world.shares:
            yield from self._if_planned("equal shares")

    def apply(self, world: World, event: Event) -> bool:
        """Returns: False for a `schedule` that found nothing to run."""
        name = event[0]
        if name == "submit":
            world.submit(next(r for r in self.requests if r.request_id == event[1]))
        elif name == "schedule":
            return world.schedule()
        elif name == "fail dispatch":
            return world.fail_dispatch()
        elif name == "read":
            world.read()
        elif name == "fail read":
            world.fail_read()
        elif name == "lose pool":
            world.lose_pool()
        elif name == "end":
            world.read(ended=world.sequences[event[1]])
        elif name == "not a number":
            world.read(broken=world.sequences[event[1]])
        elif name == "abort":
            world.abort(event[1])
        elif name == "pause":
            world.scheduler.pause(event[1])
        elif name == "resume":
            world.scheduler.resume(event[1])
        elif name == "expire":
            world.expire()
        elif name == "equal shares":
            world.share_equally()
        else:
            world.version = "v2"
        return True

    def _if_planned(self, name: str, sequence: Sequence | None = None) -> Iterator[Event]:
        if name in self.names:
            yield (name,) if sequence is None else (name, sequence.request.request_id)


@dataclass(slots=True)
class State:
    """What is kept of a state: how it came about, and where each event leads."""

    before: int | None
    event: Event
    is_busy: bool  # something is live or under way
    following: dict[Event, Edge] = field(default_factory=dict[Event, "Edge"])
    is_stalled: bool = False  # `schedule` finds nothing to run

    def next_keys(self) -> set[int]:
        """Where any event leads, but those that find nothing to do."""
        nothing = {("schedule",), ("fail dispatch",)} if self.is_stalled else set[Event]()
        return {edge.key for event, edge in self.following.items() if event not in nothing}

    def undisturbed(self, *, is_deep: bool) -> Edge | None:
        """Where it goes when nothing else happens; where nothing can, a paused one is resumed.

        Args:
            is_deep: the next step is dispatched before the last one is read.
        """
        schedule, read = self.following.get(("schedule",)), self.following.get(("read",))
        if read is None and (schedule is None or self.is_stalled):
            resumed = (edge for event, edge in self.following.items() if event[0] == "resume")
            return next(resumed, schedule)
        if read is None or (is_deep and not self.is_stalled):
            return schedule or read
        return read


@dataclass(frozen=True, slots=True)
class Edge:
    """A transition: the state that it leads to, and how many were preempted on the way."""

    key: int
    num_preempted: int


@dataclass(slots=True)
class Exploration:
    """All states by key; `is_closed` if no event leads out of them."""

    states: dict[int, State] = field(default_factory=dict[int, State])
    num_transitions: int = 0
    num_preempting: int = 0  # transitions that preempt
    num_evicting: int = 0
    num_compared: int = 0  # merged worlds whose future was compared
    is_closed: bool = False

    def path(self, key: int) -> list[Event]:
        """Shortest events that lead to a state."""
        events: list[Event] = []
        state = self.states[key]
        while state.before is not None:
            events.append(state.event)
            state = self.states[state.before]
        return events[::-1]


class LawBroken(AssertionError):
    """A law, and the shortest way to break it."""

    def __init__(self, cause: Exception, path: list[Event]):
        name = str(cause) or f"{traceback.extract_tb(cause.__traceback__)[-1].line}"
        super().__init__(f"{name.splitlines()[0]}; after {path}")


class Explorer:
    """Visits states and checks the laws in each.

    Args:
        compare_every: one in so many worlds that are merged into a known state is kept, to see
            that its future is that of the state.
    """

    def __init__(self, plan: Plan, *, compare_every: int = 200):
        self.found = Exploration()
        self._plan, self._compare_every = plan, compare_every
        self._snapshots = Snapshots()
        self._todo: deque[tuple[int, bytes, list[Event]]] = deque()
        self._merged: list[tuple[int, bytes, list[Event]]] = []
        self._num_merged = 0

    def run(self, max_states: int | None = None) -> Exploration:
        """Until all states are visited, or so many.

        Raises: LawBroken with the events that lead there.
        """
        world, found = World(self._plan.setup), self.found
        key = state_key(world)
        found.states[key] = State(None, (), is_busy=False)
        self._todo.append(self._kept(key, world))
        while self._todo:
            if max_states is not None and len(found.states) >= max_states:
                return found
            key, frozen, events = self._todo.popleft()
            for event in events:
                self._visit(key, self._snapshots.thaw(frozen), event)
        self._compare()
        found.is_closed = True
        return found

    def _visit(self, before: int, world: World, event: Event) -> None:
        found = self.found
        try:
            edge = self._take(before, world, event)
            if edge.key not in found.states:
                found.states[edge.key] = State(before, event, bool(world.live or world.flights))
                check(world)
                self._todo.append(self._kept(edge.key, world))
                return
        except Exception as error:
            raise LawBroken(error, [*found.path(before), event]) from error
        self._num_merged += 1
        if self._num_merged % self._compare_every == 0:
            self._merged.append(self._kept(edge.key, world))

    def _take(self, before: int, world: World, event: Event) -> Edge:
        found, state = self.found, self.found.states[before]
        num_preemptions, num_indexed = world.num_preemptions, len(world.scheduler.pool.index)
        is_step = self._plan.apply(world, event)
        edge = Edge(state_key(world), world.num_preemptions - num_preemptions)
        state.following[event] = edge
        found.num_transitions += 1
        found.num_preempting += edge.num_preempted > 0
        if event == ("schedule",):
            state.is_stalled = not is_step
            found.num_evicting += len(world.scheduler.pool.index) < num_indexed
        return edge

    def _kept(self, key: int, world: World) -> tuple[int, bytes, list[Event]]:
        return key, self._snapshots.freeze(world), list(self._plan.events(world))

    def _compare(self) -> None:
        """Raises: LawBroken if a world was merged into a state with another future."""
        for key, frozen, events in self._merged:
            keys: dict[Event, int] = {}
            for event in events:
                world = self._snapshots.thaw(frozen)
                self._plan.apply(world, event)
                keys[event] = state_key(world)
            known = {event: edge.key for event, edge in self.found.states[key].following.items()}
            if keys != known:
                raise LawBroken(
                    AssertionError("law: one state has one future"), self.found.path(key)
                )
            self.found.num_compared += 1


def check_no_circle(found: Exploration) -> None:
    """Whatever happens, and fails, no state comes again: so nothing begins again for ever.

    Raises: LawBroken with a state that comes again.
    """
    num_ways: dict[int, int] = dict.fromkeys(found.states, 0)
    for state in found.states.values():
        for key in state.next_keys():
            num_ways[key] += 1
    ready = [key for key, number in num_ways.items() if not number]
    while ready:
        for key in found.states[ready.pop()].next_keys():
            num_ways[key] -= 1
            if not num_ways[key]:
                ready.append(key)
    for key, number in num_ways.items():
        if number:
            raise LawBroken(AssertionError("law: no state comes again"), found.path(key))


@dataclass(frozen=True, slots=True)
class Runs:
    """The longest undisturbed run to the end, over all states."""

    num_events: int
    num_preemptions: int


def runs_to_the_end(found: Exploration, *, is_deep: bool) -> Runs:
    """Follows each state, without further events, until nothing is live or under way.

    Args:
        is_deep: with the next step dispatched before the last one is read.
    Raises: LawBroken if some state never gets there.
    """
    done: dict[int, tuple[int, int]] = {}  # key -> events, preemptions to the end
    for start in found.states:
        path: dict[int, int] = {}  # key -> preempted when it is left
        key = start
        while key not in done:
            state = found.states[key]
            if not state.is_busy:
                done[key] = (0, 0)
                break
            edge = state.undisturbed(is_deep=is_deep)
            if key in path or edge is None:
                raise LawBroken(AssertionError("law: every run comes to its end"), found.path(key))
            path[key] = edge.num_preempted
            key = edge.key
        num_events, num_preempted = done[key]
        for key in reversed(path):
            num_events, num_preempted = num_events + 1, num_preempted + path[key]
            done[key] = (num_events, num_preempted)
    return Runs(max(n for n, _ in done.values()), max(n for _, n in done.values()))
