"""The versions that are here, from their coming to their end: who is stable, who stands by.

No HTTP and no JAX. Everything belongs to the event loop. Calls go elsewhere when a method returns;
engines hear of it in the order of the calls, and memory is given back when the last call has ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import JaxInferError, ModelNotFound
from jaxinfer.heap import trim_heap

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.engine import Engine
    from jaxinfer.server.served_versions import ServedVersions
    from jaxinfer.server.version_slot import VersionSlot

log = logging.getLogger(__name__)

MIN_TURN_SHARE = 0.01  # of the steps, so that calls that name a version get somewhere
TRIM_BYTES = 16 << 20  # of weights: trimming stops whoever allocates, for 20 ms and up
AGAIN_S = 0.5  # an engine that did not answer is asked again
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Roster:
    """Slots, in the order of their coming.

    Args:
        first: the stable one.
        versions: who gets which call; it knows the first already.
        free_first: gives back what the first one's engine holds, when no version of it is left.
        spawn: runs something in the background.
    """

    def __init__(
        self,
        first: VersionSlot,
        versions: ServedVersions,
        *,
        free_first: Callable[[], None],
        spawn: Spawn,
    ):
        assert first.engine is not None
        self._slots = [first]
        self._versions = versions
        self._home = first.engine
        self._free_first = free_first
        self._spawn = spawn

    @property
    def slots(self) -> tuple[VersionSlot, ...]:
        return tuple(self._slots)

    @property
    def home(self) -> AsyncEngine:
        """The engine of the first version."""
        return self._home

    @property
    def stable(self) -> VersionSlot:
        return next(slot for slot in self._slots if slot.life == "stable")

    @property
    def standby(self) -> VersionSlot | None:
        return next((slot for slot in self._slots if slot.life == "standby"), None)

    def named(self, version: str) -> VersionSlot:
        """The one that calls may have, else the newest of that name. Raises: ModelNotFound."""
        found = [slot for slot in self._slots if slot.name == version]
        if found:
            return next((slot for slot in found if slot.is_routed), found[-1])
        raise ModelNotFound(
            f"there is no version {version[:80]!r}; there is "
            f"{', '.join(slot.name for slot in self._slots)}",
            param="version",
            code="version_not_found",
        )

    def add(self, slot: VersionSlot) -> None:
        """One that was ordered."""
        self._slots.append(slot)

    def try_out(self, slot: VersionSlot, share: float) -> None:
        """It gets this share of the calls, and of the steps."""
        assert slot.model is not None
        slot.become("canary")
        slot.is_routed = True
        self._versions.add(slot.model)
        self._versions.try_out(slot.name, share)
        if slot.engine is self.stable.engine:
            shares = {self.stable.name: 1.0 - share, slot.name: share}
            self._tell(slot, _set_shares({n: _turn_share(s) for n, s in shares.items()}))

    def make_stable(self, slot: VersionSlot, now: float) -> None:
        """All new calls go to it; who was stable stands by."""
        before = self.stable
        before.become("standby")
        before.standby_since_s = now
        self._serve(slot)

    def go_back(self) -> None:
        """To the one that stands by; who was stable leaves."""
        before, slot = self.stable, self.standby
        assert slot is not None
        before.become("leaving")
        self._serve(slot)
        self.send_away(before)

    def replace(self, before: VersionSlot, slot: VersionSlot) -> None:
        """The parameters of `before` are overwritten with those of `slot`, which is stable."""
        before.become("leaving")
        before.is_installed, before.discard = False, None
        self._serve(slot)
        self.send_away(before)

    def send_away(self, slot: VersionSlot) -> None:
        """It gets no more calls, and is gone when its last one has ended."""
        slot.become("leaving")
        if slot.is_routed:
            self._versions.remove(slot.name)
        self._spawn(self._leave(slot))

    def _serve(self, slot: VersionSlot) -> None:
        assert slot.model is not None
        name = slot.name
        slot.become("stable")
        slot.is_routed = True
        self._versions.serve(slot.model)
        self._tell(slot, _set_shares({}))
        self._tell(slot, lambda core: core.serve_version(name))

    async def _leave(self, slot: VersionSlot) -> None:
        engine, is_large = slot.engine, slot.weights_bytes >= TRIM_BYTES
        if slot.is_routed:
            await self._versions.wait_until_unused(slot.name)
        while slot.life != "gone":
            try:  # who shares its engine is another one than when its last calls began
                await slot.leave([other for other in self._slots if other is not slot])
            except JaxInferError as error:
                log.warning("version %s is not gone yet: %s", slot.name, error)
                await asyncio.sleep(AGAIN_S)
        self._slots.remove(slot)
        gc.collect()  # 2 ms, since what start-up made is frozen: cycles hold what was read
        if is_large:
            await asyncio.to_thread(trim_heap)
        if engine is self._home and all(s.engine is not engine for s in self._slots):
            await asyncio.to_thread(self._free_first)

    def _tell(self, slot: VersionSlot, change: Callable[[Engine], None]) -> None:
        if slot.engine is not None:
            self._spawn(_told(slot.engine, change))


def _turn_share(share: float) -> float:
    """Of the steps. With n streams of a version that gets f of the steps, the mean time between
    tokens goes by the sum of n / f, which is least where f goes by the root of n.
    """
    return math.sqrt(max(share, MIN_TURN_SHARE))


def _set_shares(shares: Mapping[str, float]) -> Callable[[Engine], None]:
    return lambda core: core.set_shares(shares)


async def _told(engine: AsyncEngine, change: Callable[[Engine], None]) -> None:
    """An engine that has died, or drains, needs to hear nothing."""
    try:
        await engine.change(change)
    except JaxInferError as error:
        log.warning("an engine was not told of a version: %s", error)
