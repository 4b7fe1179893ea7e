"""A version on its way in: found, loaded, put in place, and let answer for the first time.

No HTTP and no JAX. Everything belongs to the event loop; weights are read on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.errors import EngineFailure, Unavailable
from jaxinfer.server.smoke import smoke
from jaxinfer.version_order import VersionOrder

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.engine import Engine
    from jaxinfer.new_version import NewVersion, OpenVersion, VersionSource
    from jaxinfer.server.long_work import LongWork
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.smoke import Recorded
    from jaxinfer.server.state import ServerState
    from jaxinfer.server.version_slot import VersionSlot

log = logging.getLogger(__name__)

PAUSE_S = 60.0  # that calls have to end before a version is streamed in
PROVING_SHARE = 0.1  # of the steps, while it answers its first prompts
LOOK_S = 0.02  # how often it is asked whether calls have ended
QUIET_S = 1.0  # without an open call: a good moment


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every arrival needs.

    home: the engine that `source` makes versions for, those with an engine of their own aside.
    make_engine: see Rollouts.
    make_model: see Rollouts.
    """

    state: ServerState
    source: VersionSource
    home: AsyncEngine
    make_engine: Callable[[Engine], AsyncEngine]
    make_model: Callable[[NewVersion, AsyncEngine], ServedModel]
    work: LongWork
    clock: Callable[[], float]


class Arrival:
    """Of one slot. Its methods are called in their order, by one task; where it ends before
    `install`, `discard` frees what was loaded.
    """

    def __init__(self, slot: VersionSlot, shop: Workshop):
        self.slot = slot
        self._shop = shop
        self._opened: OpenVersion | None = None
        self._new: NewVersion | None = None

    async def find(self) -> None:
        """Raises: what VersionSource.open does."""
        shop, order = self._shop, self.slot.order
        self._opened = await shop.work.run(
            "find-version", lambda: shop.source.open(order, self._say), unwanted=_close
        )
        self.slot.note_found(self._opened)

    async def load(self) -> None:
        """Raises: what OpenVersion.load does; ValueError for one that cannot be served."""
        opened = self._opened
        assert opened is not None
        self.slot.become("loading")
        new = await self._shop.work.run(
            "load-version", lambda: opened.load(self._say), unwanted=_discard
        )
        self._opened, self._new = None, new
        self.slot.note_loaded(new)
        self.slot.engine = (
            self._shop.home if new.engine is None else self._shop.make_engine(new.engine)
        )
        engine = self.slot.engine
        self.slot.model = await self._shop.work.run(
            "serve-version",
            lambda: self._shop.make_model(new, engine),
            unwanted=lambda model: model.close(),
        )

    @property
    def is_apart(self) -> bool:
        """Whether it will have an engine of its own. Before `load`."""
        assert self._opened is not None
        return self._opened.manner == "engine"

    @property
    def is_streamed(self) -> bool:
        """Whether it takes the place of the version that serves, in a pause."""
        assert self._new is not None
        return self._new.manner == "stream"

    async def install(self) -> None:
        """Not for one that is streamed. Raises: what NewVersion.install does; Unavailable."""
        new, slot = self._new, self.slot
        assert new is not None
        assert slot.engine is not None
        slot.become("installing")
        slot.is_installed = True
        if new.engine is not None:
            slot.engine.start()
            return
        try:
            await slot.engine.change(new.install)
        except Unavailable:  # it may still happen: the engine is told to drop it behind that
            raise
        except Exception:
            slot.is_installed = False
            raise

    async def prove(self, recorded: Sequence[Recorded]) -> None:
        """Raises: SmokeFailed; Unavailable when its engine has died."""
        slot, name = self.slot, self.slot.name
        slot.become("proving")
        assert slot.model is not None
        if slot.engine is self._shop.home:
            await self._shop.home.change(lambda core: core.set_shares({name: PROVING_SHARE}))
        await smoke(slot.model, recorded)

    def discard(self) -> None:
        """What was found and is not loaded; loading ends early."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    async def give_back(self) -> None:
        """As `discard`; also what was loaded, unless the engine has it."""
        self.discard()
        if self.slot.discard is not None:
            await asyncio.to_thread(self.slot.discard)

    async def wait_for_quiet(self, within_s: float) -> None:
        """Returns when no call was open for QUIET_S, or after `within_s`."""
        clock, state = self._shop.clock, self._shop.state
        since_s = began_s = clock()
        while clock() - since_s < QUIET_S and clock() - began_s < within_s:
            await asyncio.sleep(LOOK_S)
            if state.admission.num_open or self._shop.home.num_open:
                since_s = clock()

    async def take_the_place_of(self, old: VersionSlot, recorded: Sequence[Recorded]) -> None:
        """Streams the new weights in over those of `old`: new calls wait meanwhile, open ones end
        before. If the new ones cannot be had, or do not answer as they should, the old ones are
        read again from where they came.

        Raises: what `install` and `prove` do, and then `old` serves on; Unavailable also if calls
            do not end within PAUSE_S.
        """
        assert self._new is not None
        door = self._shop.state.door
        reason = f"version {self.slot.name} is streamed in over {old.name}"
        log.warning("pause: %s; new calls wait", reason)
        began_s = self._shop.clock()
        door.shut(reason)
        try:
            await self._until_no_call()
            await self._stream(self._new, old, recorded)
        finally:
            door.open()
            log.warning("pause: over after %.1f s", self._shop.clock() - began_s)

    async def _stream(
        self, new: NewVersion, old: VersionSlot, recorded: Sequence[Recorded]
    ) -> None:
        self.slot.become("installing")
        await self._install_held(new)  # where it fails, it has read the old ones again
        self.slot.is_installed = True
        assert self.slot.model is not None
        try:
            await smoke(self.slot.model, recorded)
        except Exception as error:
            if self._shop.state.phase == "draining":  # nobody will be answered, by neither
                raise
            log.error("version %s does not answer as it should: %s", new.name, error)
            self.slot.is_installed = False
            await self._restore(old)
            raise

    async def _install_held(self, new: NewVersion) -> None:
        """Not released when it is broken off: the thread may still write."""
        home = self._shop.home
        core = await home.hold(PAUSE_S)
        try:
            await self._shop.work.run("stream-version", lambda: new.install(core))
        except Exception as error:
            home.release()
            if isinstance(error, EngineFailure):
                self._give_up(error)
            raise
        home.release()

    async def _restore(self, old: VersionSlot) -> None:
        """Its weights, from where they came. Without them nobody can be answered any more."""
        shop = self._shop
        order = VersionOrder(old.order.source, expected_version=old.name, swap_mode="stream")
        try:
            opened = await shop.work.run("find-version", lambda: shop.source.open(order, self._say))
            before = await shop.work.run("load-version", lambda: opened.load(self._say))
            await self._install_held(before)
        except Exception as error:
            self._give_up(error)
        else:
            log.warning("version %s has been read again and serves on", old.name)

    def _give_up(self, error: Exception) -> None:
        reason = "the weights are lost and could not be read again"
        log.critical("%s: %s; restart the server", reason, error)
        self._shop.state.door.bar(f"{reason}; the server must be restarted")

    async def _until_no_call(self) -> None:
        """Of those that have a model; the others wait at the door."""
        versions, clock = self._shop.state.versions, self._shop.clock
        until_s = clock() + PAUSE_S
        while any(versions.num_calls(model.version) for model in versions.all):
            if clock() >= until_s:
                raise Unavailable(
                    f"calls have not ended within {PAUSE_S:g} s, so nothing was replaced; try "
                    "again when there are fewer, or end them",
                    retry_after_s=PAUSE_S,
                )
            await asyncio.sleep(LOOK_S)

    def _say(self, text: str) -> None:
        """On any thread."""
        self.slot.progress = text


def _close(opened: OpenVersion) -> None:
    opened.close()


def _discard(new: NewVersion) -> None:
    new.discard()
