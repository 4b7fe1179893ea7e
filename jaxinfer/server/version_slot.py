"""One version of the weights in a server: from an order to the last byte of its memory.

No HTTP and no JAX. Everything belongs to the event loop.

    finding -> loading -> installing -> proving -> canary -> stable <-> standby
       all of them but installing -> leaving -> gone
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from jaxinfer.errors import Conflict

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.engine import Engine
    from jaxinfer.new_version import NewVersion, OpenVersion
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.version_order import VersionOrder

Life = Literal[
    "finding", "loading", "installing", "proving", "canary", "stable", "standby", "leaving", "gone"
]
ARRIVING: tuple[Life, ...] = ("finding", "loading", "installing", "proving")
LOOK_S = 0.05  # how often the engine is asked whether it has let a version go
NEXT: Mapping[Life, tuple[Life, ...]] = {
    "finding": ("loading", "leaving"),
    "loading": ("installing", "leaving"),
    "installing": ("proving", "stable", "leaving"),
    "proving": ("canary", "stable", "leaving"),
    "canary": ("stable", "leaving"),
    "stable": ("standby", "leaving"),
    "standby": ("stable", "leaving"),
    "leaving": ("gone",),
    "gone": (),
}


@dataclass(eq=False, slots=True)
class VersionSlot:
    """What is known of it, and what it holds."""

    order: VersionOrder  # where it came from
    life: Life = "finding"
    name: str = ""  # content hash; before it is found, what the order names
    root: str = ""
    weights_bytes: int = 0
    lines: tuple[str, ...] = ()  # for people
    progress: str = ""
    engine: AsyncEngine | None = None  # that computes it
    model: ServedModel | None = None  # that answers
    is_installed: bool = False  # its engine has it
    is_routed: bool = False  # calls may have it
    discard: Callable[[], None] | None = None  # frees what is its own
    standby_since_s: float = 0.0
    num_failed_steps: int = 0  # in a row
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.name = self.name or self.order.source.model

    def become(self, life: Life) -> None:
        """The next part of its life; the same one again does nothing."""
        if life == self.life:
            return
        assert life in NEXT[self.life], f"{self.name}: {self.life} -> {life}"
        self.life = life
        self.progress = ""
        if life == "gone":
            self.left.set()

    @classmethod
    def of(cls, model: ServedModel, order: VersionOrder) -> VersionSlot:
        """One that is stable from the beginning."""
        return cls(
            order,
            life="stable",
            name=model.version,
            root=model.root,
            weights_bytes=model.weights_bytes,
            engine=model.engine,
            model=model,
            is_installed=True,
            is_routed=True,
        )

    @property
    def is_arriving(self) -> bool:
        return self.life in ARRIVING

    def note_found(self, found: OpenVersion) -> None:
        self.name, self.root, self.lines = found.name, found.root, found.lines
        self.weights_bytes = found.weights_bytes

    def note_loaded(self, new: NewVersion) -> None:
        """It holds memory from here on."""
        self.root, self.lines, self.weights_bytes = new.root, new.lines, new.weights_bytes
        self.discard = new.discard

    async def leave(self, others: Collection[VersionSlot]) -> None:
        """Gives back all that it holds. No call of it may be left, and none may come.

        Args:
            others: that are here; one of them may share its engine.
        Raises: Unavailable if the engine does not answer, Conflict while all of it leave; it may
            be called again then.
        """
        if self.engine is not None and self.is_installed:
            companions = [o for o in others if o.engine is self.engine and o.is_installed]
            if companions:
                await self._leave_engine(self.engine, companions)
            else:
                await self._close_engine(self.engine)
        else:
            await self._discard()
        if self.model is not None:
            self.model.close()
        self.model = self.engine = self.discard = None
        self.become("gone")

    async def _leave_engine(self, engine: AsyncEngine, companions: Collection[VersionSlot]) -> None:
        """The engine frees the parameters itself, when nothing computes with them."""
        if not engine.is_alive:
            await self._discard()  # it may have died before this one was installed
            return
        name = self.name
        others = [o.name for o in sorted(companions, key=lambda o: o.life != "stable")]
        await engine.change(lambda core: _drop(core, name, others))
        while engine.is_alive and await engine.change(lambda core: name in core.versions):
            await asyncio.sleep(LOOK_S)

    async def _close_engine(self, engine: AsyncEngine) -> None:
        await engine.close()
        await self._discard()

    async def _discard(self) -> None:
        if self.discard is not None:
            await asyncio.to_thread(self.discard)


def _drop(core: Engine, name: str, others: Sequence[str]) -> None:
    """Raises: Conflict if it is current, and the engine takes requests of none of the others."""
    if core.version == name:
        heir = next(filter(core.takes_version, others), None)
        if heir is None:
            raise Conflict(f"version {name} is current, and those beside it leave, too")
        core.serve_version(heir)
    core.drop_version(name)
