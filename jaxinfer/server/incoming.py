"""What is on its way in: from an order to a canary, or to the reason why not.

No HTTP and no JAX. Everything belongs to the event loop; weights are read on threads.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from checkpoints.errors import CheckpointError
from jaxinfer.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    JaxInferError,
    NoRoom,
    Unavailable,
)
from jaxinfer.server.arrival import Arrival, Workshop
from jaxinfer.server.reload import reload
from jaxinfer.server.smoke import SmokeFailed
from jaxinfer.server.version_slot import VersionSlot

if TYPE_CHECKING:
    from jaxinfer.rollout import RolloutPlan
    from jaxinfer.server.decision_book import DecisionBook
    from jaxinfer.server.roster import Roster, Spawn
    from jaxinfer.server.smoke import Recorded
    from jaxinfer.server.trials import Trial, Trials
    from jaxinfer.version_order import VersionOrder

log = logging.getLogger(__name__)

OPERATOR = "operator"
OPEN_S = 10.0  # that a caller waits for a version to be found; a download goes on behind that


class Incoming:
    """At most one version at a time, and not while there is a canary.

    Args:
        shop: None: versions come from nowhere, and every order is refused.
        spawn: runs something in the background.
    """

    def __init__(
        self,
        shop: Workshop | None,
        roster: Roster,
        trials: Trials,
        book: DecisionBook,
        *,
        spawn: Spawn,
    ):
        self._shop = shop
        self._roster, self._trials, self._book = roster, trials, book
        self._spawn = spawn
        self._arriving: asyncio.Task[None] | None = None  # the last one
        self._reload: VersionSlot | None = None
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at work that must not meet a dying interpreter."""
        return self._shop is not None and self._shop.work.is_busy

    @property
    def reloading(self) -> VersionSlot | None:
        """What is being read again."""
        return self._reload

    async def begin(
        self, order: VersionOrder, plan: RolloutPlan, recorded: tuple[Recorded, ...]
    ) -> None:
        """Returns when the version has been found, or after OPEN_S. See Rollouts."""
        shop = self._free_shop()
        slot = VersionSlot(order)
        trial = self._trials.begin(slot, plan)
        self._roster.add(slot)
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arriving = self._spawn(self._bring(trial, Arrival(slot, shop), recorded, found))
        await _until_found(found)

    async def reload(self, stable: VersionSlot, within_s: float) -> None:
        """The same for the version that is here. See Rollouts."""
        shop = self._free_shop()
        slot = self._reload = VersionSlot(
            replace(stable.order, expected_version=stable.name), name=stable.name
        )
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spawn(self._bring_again(stable, Arrival(slot, shop), within_s, found))
        await _until_found(found)

    def take_back(self, trial: Trial, reason: str) -> None:
        """One that arrives and is not just put in place."""
        assert self._arriving is not None
        self._arriving.cancel()
        self._trials.failed(trial, reason)

    def stop(self) -> None:
        """Nothing begins any more, and what arrives is left. A version that is just put in place
        gets there.
        """
        self._is_stopped = True
        trial = self._trials.last
        if self._arriving is not None and trial is not None and trial.slot.life != "installing":
            self._arriving.cancel()

    async def _bring(
        self,
        trial: Trial,
        arrival: Arrival,
        recorded: tuple[Recorded, ...],
        found: asyncio.Future[None],
    ) -> None:
        """From an order to a canary, or to the reason why not."""
        try:
            await self._find(arrival)
            self._check_new(arrival)
            _fulfil(found)
            await self._make_room(trial.slot)
            await arrival.load()
            stable = self._roster.stable
            if arrival.is_streamed:
                await arrival.take_the_place_of(stable, recorded)
                self._trials.has_replaced(trial, stable)
            else:
                await arrival.install()
                await arrival.prove(recorded)
                self._trials.arrived(trial)
        except asyncio.CancelledError:
            self._leave(arrival)
            _refuse(found, Conflict("the order was taken back", param="model"))
            raise
        except Exception as error:
            self._leave(arrival)
            _refuse(found, error)
            self._trials.failed(trial, reason_of(error))

    async def _bring_again(
        self, stable: VersionSlot, arrival: Arrival, within_s: float, found: asyncio.Future[None]
    ) -> None:
        """The stable version over itself."""
        try:
            await reload(arrival, stable, within_s=within_s, on_found=lambda: _fulfil(found))
        except Exception as error:
            await arrival.give_back()
            _refuse(found, error)
            log.error("version %s was not read again: %s", stable.name, reason_of(error))
        else:
            self._book.note("reload", stable.name, by=OPERATOR, reason="it was read again")
        finally:
            self._reload = None

    def _leave(self, arrival: Arrival) -> None:
        """What has been read so far is given back."""
        arrival.discard()
        if not self._is_stopped and arrival.slot.is_arriving:
            self._roster.send_away(arrival.slot)

    async def _find(self, arrival: Arrival) -> None:
        """Where there is no room, the version that stands by goes, and it is tried again."""
        try:
            await arrival.find()
        except NoRoom:
            if self._roster.standby is None:
                raise
            await self._make_room(arrival.slot)
            await arrival.find()

    def _check_new(self, arrival: Arrival) -> None:
        """Raises: Conflict if a version of that name is here; InvalidRequest if the engine that it
        belongs into is not.
        """
        slot = arrival.slot
        if not (arrival.is_apart or self._roster.home.is_alive):
            raise InvalidRequest(
                f"version {slot.name} belongs into the first engine, which was given back; "
                "restart the server with it",
                param="model",
            )
        for other in self._roster.slots:
            if other is not slot and other.name == slot.name:
                how = {
                    "stable": "is stable; `reload` reads it again",
                    "standby": "stands by; promote it, or drop it first",
                }.get(other.life, "still has calls; wait until it is gone")
                raise Conflict(f"version {slot.name} {how}", param="model")

    async def _make_room(self, slot: VersionSlot) -> None:
        """Memory is planned for two versions."""
        standby = self._roster.standby
        if standby is not None:
            slot.progress = f"waits until version {standby.name} is gone"
            self._trials.end_standby(f"version {slot.name} comes", by=OPERATOR)
            await standby.left.wait()

    def _free_shop(self) -> Workshop:
        """Raises: Unavailable, Conflict, InvalidRequest: nothing can come now."""
        trial, shop = self._trials.last, self._shop
        if shop is None:
            raise InvalidRequest("this server can load no versions; restart it with the model")
        if self._is_stopped or shop.state.phase == "draining":
            raise Unavailable("the server shuts down", retry_after_s=60.0, code="draining")
        if trial is not None and (trial.slot.is_arriving or trial.slot.life == "canary"):
            raise Conflict(
                f"version {trial.slot.name} is {trial.slot.life}; promote it or roll it back first"
            )
        if self._reload is not None:
            raise Conflict("the stable version is being read again; wait until it is there")
        if shop.work.is_busy:
            raise Conflict("a load that was taken back has not ended; try again in a moment")
        return shop


def reason_of(error: Exception) -> str:
    """In one line; that of a library comes with its type."""
    text = " ".join(str(error).split()) or type(error).__name__
    is_known = isinstance(error, JaxInferError | CheckpointError | SmokeFailed)
    return text if is_known else f"{type(error).__name__}: {text}"


def _fulfil(found: asyncio.Future[None]) -> None:
    if not found.done():
        found.set_result(None)


def _refuse(found: asyncio.Future[None], error: Exception) -> None:
    """What is wrong with the model is its caller's fault."""
    if found.done():
        return
    is_told = isinstance(error, JaxInferError) and not isinstance(error, ConfigError)
    found.set_exception(error if is_told else InvalidRequest(reason_of(error), param="model"))


async def _until_found(found: asyncio.Future[None]) -> None:
    """Or for OPEN_S. Raises: why it was not found."""
    await asyncio.wait({found}, timeout=OPEN_S)
    if found.done():
        found.result()
    else:  # nobody will ask
        found.add_done_callback(lambda future: future.cancelled() or future.exception())
