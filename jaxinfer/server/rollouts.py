"""What turns an operator's order into a served version, and does what the rollout machine decides.

No HTTP and no JAX. Everything belongs to the event loop; weights are read on threads. Calls go
elsewhere in the call that decides; the rest follows: engines are told, memory is given back when
the last call has ended, the log is written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import Conflict
from jaxinfer.server.arrival import Workshop
from jaxinfer.server.decision_book import DecisionBook
from jaxinfer.server.incoming import OPERATOR, Incoming
from jaxinfer.server.listening import Listening
from jaxinfer.server.long_work import LongWork
from jaxinfer.server.rollout_status import machine_status, version_status
from jaxinfer.server.roster import Roster
from jaxinfer.server.trials import Trials
from jaxinfer.server.version_slot import VersionSlot

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.config import ModelSource
    from jaxinfer.engine import Engine
    from jaxinfer.new_version import NewVersion, VersionSource
    from jaxinfer.rollout import RolloutPlan
    from jaxinfer.rollout_log import RolloutLog
    from jaxinfer.server.listening import Compare
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.smoke import Recorded
    from jaxinfer.server.state import ServerState
    from jaxinfer.version_order import VersionOrder

log = logging.getLogger(__name__)

STANDBY_S = 600.0
TICK_S = 0.25


class Rollouts:
    """At most one version comes at a time, beside the stable one and the one before it.

    `ServerState.rollouts` holds it once the model is ready. After a promotion the version before
    stands by, so that going back is a matter of routing, until the next load, `standby_s`, or
    `drop`.

    Args:
        state: of the server; its stable model must be there.
        order: where the stable version came from.
        source: where versions come from; None: this build has none, and `begin` says so.
        log: every decision goes there.
        make_engine: an AsyncEngine for a version that has an engine of its own, not started.
        make_model: what serves a version on an engine; may take long, runs on a thread.
        free_first: gives back what the first engine holds, when no version of it is left.
        compare: asks both versions the same, where a plan wants it; None: nobody does.
        before: what the log says of the last process, for `status`.
        standby_s: how long a version stands by.
        clock, wall_clock: monotonic seconds; seconds since 1970, for the log.
    """

    def __init__(
        self,
        state: ServerState,
        order: VersionOrder,
        *,
        source: VersionSource | None,
        log: RolloutLog,
        make_engine: Callable[[Engine], AsyncEngine],
        make_model: Callable[[NewVersion, AsyncEngine], ServedModel],
        free_first: Callable[[], None] = lambda: None,
        compare: Compare | None = None,
        before: str | None = None,
        standby_s: float = STANDBY_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        first = state.model
        assert first is not None, "a model must be served first"
        self._state = state
        self._before = before
        self._clock = clock
        self._book = DecisionBook(log, wall_clock)
        self._tasks: set[asyncio.Task[None]] = set()
        slot = VersionSlot.of(first, order)
        self._roster = Roster(slot, state.versions, free_first=free_first, spawn=self._spawn)
        self._trials = Trials(
            self._roster,
            self._book,
            Listening(state, compare=compare, spawn=self._spawn),
            ailment_of=state.ailment_of,
            standby_s=standby_s,
            clock=clock,
        )
        shop = None
        if source is not None:
            shop = Workshop(
                state=state,
                source=source,
                home=first.engine,
                make_engine=make_engine,
                make_model=make_model,
                work=LongWork(),
                clock=clock,
            )
        self._incoming = Incoming(shop, self._roster, self._trials, self._book, spawn=self._spawn)
        self._has_ended = False
        self._book.started(slot.name, slot.root)

    def start(self) -> None:
        """Lets time pass for what is tried; call it on the event loop."""
        self._spawn(self._watch())

    @property
    def stable_source(self) -> ModelSource:
        """Where the stable version came from."""
        return self._roster.stable.order.source

    # ---- what an operator asks for

    async def begin(
        self,
        order: VersionOrder,
        plan: RolloutPlan,
        *,
        recorded: Sequence[Recorded] = (),
        promotes_at_once: bool = False,
    ) -> None:
        """Loads a version in the background, tries it out and rolls it out by `plan`.

        Returns when it has been found and its headers fit, or after ten seconds; the rest is told
        by `status`. The version that stands by goes before it is loaded.

        Args:
            recorded: what it must say before it gets a call; none: it must say anything at all.
            promotes_at_once: all calls go to it as soon as it is there, and nothing is judged.
        Raises: Conflict while another one comes; InvalidRequest with param `model` for one that
            cannot be found or does not fit; Unavailable while the server shuts down.
        """
        if promotes_at_once:
            plan = replace(plan, stages=(), promotes=True)
        await self._incoming.begin(order, plan, tuple(recorded))

    async def promote(self, version: str) -> None:
        """All new calls go to the canary, or back to the one that stands by.

        Raises: ModelNotFound for a version that is not there; Conflict if it is stable, or is not
            ready to be served.
        """
        slot, trial = self._roster.named(version), self._trials.canary
        if slot.life == "standby":
            self._go_back("an operator promoted the version that stood by")
        elif trial is not None and slot is trial.slot:
            self._trials.promote(trial)
        else:
            raise Conflict(
                f"version {version} is {slot.life}; only a canary, or a version that stands by, "
                "can be promoted",
                param="version",
            )

    async def roll_back(self, version: str) -> None:
        """No new call goes to this version: a canary, one that still loads, or the stable one
        while the one before it stands by. Calls that began end where they began.

        Raises: ModelNotFound for a version that is not there; Conflict if it gets no calls, or
            there is none to go back to.
        """
        slot = self._roster.named(version)
        if slot.life == "stable":
            self._go_back("an operator rolled it back")
        elif slot.life in ("standby", "leaving", "installing"):
            raise Conflict(f"version {version} is {slot.life}; it gets no calls", param="version")
        else:
            self._take_back(slot, "an operator rolled it back")

    async def drop(self, version: str) -> None:
        """It gets no more calls; its memory is free when its last one has ended, which is not
        waited for.

        Raises: ModelNotFound for a version that is not there; Conflict for the stable one, and
            for one that is just put in place.
        """
        slot = self._roster.named(version)
        if slot.life == "stable":
            raise Conflict(
                f"version {version} is stable; promote another one first", param="version"
            )
        if slot.life == "installing":
            raise Conflict(
                f"version {version} is just put in place; try again in a moment", param="version"
            )
        if slot.life == "standby":
            self._trials.end_standby("an operator dropped it", by=OPERATOR)
        elif slot.life != "leaving":
            self._take_back(slot, "an operator dropped it")

    async def reload(self, version: str, *, within_s: float) -> None:
        """Reads the stable version once more from where it came, in the background.

        It is put in place when no call has been open for a second, at most `within_s` seconds
        after it is read, and then anyway.

        Raises: as `begin`; ModelNotFound for a version that is not there; Conflict for one that
            is not stable.
        """
        stable = self._roster.named(version)
        if stable.life != "stable":
            raise Conflict(
                f"version {version} is {stable.life}; only the stable one can be read again",
                param="version",
            )
        await self._incoming.reload(stable, within_s)

    def status(self) -> dict[str, Any]:
        """For people and programs, plain JSON:

        stable: its version.
        versions: [{version, role: stable | canary | standby | loading | leaving, root, share,
            calls, bytes, progress, lines, standby_s}].
        rollout: {version, stable, phase, share, plan, evidence, reason} of the one under way or
            the last one, or None.
        reload: what is done for it, or None.
        decisions: the last ones of this process, oldest first: {at, kind, by, reason, phase,
            stable, canary, share, numbers}.
        pause: why new calls wait, or None.
        before_this_start: what the log says was under way when the last process ended, or None.
        """
        now, trial, again = self._clock(), self._trials.last, self._incoming.reloading
        slots, versions = self._roster.slots, self._state.versions
        return {
            "stable": self._roster.stable.name,
            "versions": [version_status(slot, versions, now) for slot in slots],
            "rollout": None if trial is None else machine_status(trial.slot, trial.machine),
            "reload": None if again is None else f"{again.life}: {again.progress}",
            "decisions": self._book.records,
            "pause": self._state.door.pause,
            "before_this_start": self._before,
        }

    def tick(self) -> None:
        """Time has passed."""
        self._trials.tick()

    # ---- the end

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at work that must not meet a dying interpreter."""
        return self._incoming.is_busy

    def stop(self) -> None:
        """The server shuts down: nothing begins any more, and what arrives is left. A version that
        is just put in place gets there.
        """
        self._incoming.stop()
        self._trials.stop()

    async def close(self) -> None:
        """Leaves what is under way, and closes the engines of versions that have their own. May be
        called again.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engines = {slot.engine for slot in self._roster.slots if slot.engine is not None}
        for engine in engines - {self._roster.home}:
            await engine.close()
        self._book.note("end", self._roster.stable.name, by="shutdown", reason="the server ends")
        await asyncio.to_thread(self._book.close)

    # ---- inside

    def _take_back(self, slot: VersionSlot, reason: str) -> None:
        """A canary, or one that arrives and is not just put in place."""
        trial = self._trials.last
        assert trial is not None
        assert trial.slot is slot
        if slot.life == "canary":
            self._trials.roll_back(trial, reason)
        else:
            self._incoming.take_back(trial, reason)

    def _go_back(self, reason: str) -> None:
        """Raises: Conflict."""
        trial = self._trials.last
        if self._roster.standby is not None and trial is not None and trial.slot.is_arriving:
            self._take_back(trial.slot, f"{self._roster.stable.name} is rolled back")
        self._trials.go_back(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a version could not be looked after", exc_info=task.exception())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:  # a fault of ours; the next look may be better
                log.exception("a rollout could not be looked after")
