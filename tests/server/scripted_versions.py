"""Versions for a house: what each `model` of an order is, or what happens on its way in.

    with open_house(...) as house, rollouts_of(house, log) as source:
        source.models["good"] = ScriptedVersion("v2")

A version computes with the house's own runner, which leaves `shift` letters out between two.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints.errors import CheckpointError
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ModelSource
from jaxinfer.engine import Engine
from jaxinfer.new_version import Manner, NewVersion
from jaxinfer.rollout_log import RolloutLog
from jaxinfer.server.decision_book import before_this_start
from jaxinfer.server.rollouts import Rollouts
from jaxinfer.server.served_model import ServedModel
from jaxinfer.version_order import VersionOrder
from jaxinfer.versions import ModelVersion
from tests.server.house import MAX_MODEL_LEN, House

Says = Callable[[str], None]


@dataclass
class ScriptedVersion:
    """`open`, `load` and `install` raise what is set; `gate` holds loading."""

    name: str
    shift: int = 1
    open_error: Exception | None = None
    load_error: Exception | None = None
    install_error: Exception | None = None
    not_numbers: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    num_discarded: int = 0

    def __post_init__(self) -> None:
        self.gate.set()


class ScriptedSource:
    """A VersionSource. `orders`: those that came."""

    def __init__(self, house: House):
        self.models: dict[str, ScriptedVersion] = {}
        self.orders: list[VersionOrder] = []
        self.house = house

    def open(self, order: VersionOrder, on_progress: Says) -> OpenedVersion:
        self.orders.append(order)
        found = self.models.get(order.source.model)
        if found is None:
            raise CheckpointError(f"{order.source.model}: no such file or folder")
        if found.open_error is not None:
            raise found.open_error
        return OpenedVersion(found, self.house)


class OpenedVersion:
    """An OpenVersion."""

    manner: Manner = "beside"
    weights_bytes = 1000
    lines = ("letters",)

    def __init__(self, version: ScriptedVersion, house: House):
        self._version = version
        self._house = house
        self.name = version.name
        self.root = f"tests/{version.name}"

    def load(self, on_progress: Says) -> NewVersion:
        version, tokenizer = self._version, self._house.tokenizer
        on_progress("reading weights")
        version.gate.wait(10)
        if version.load_error is not None:
            raise version.load_error
        found = ModelVersion(self.name, tokenizer, tokenizer.eos_token_ids)

        def install(engine: Engine) -> None:
            if version.install_error is not None:
                raise version.install_error
            self._house.runner.shifts[self.name] = version.shift
            if version.not_numbers:
                self._house.runner.not_numbers.add(self.name)
            engine.add_version(found)

        def discard() -> None:
            version.num_discarded += 1

        return NewVersion(
            model_version=found,
            manner=self.manner,
            root=self.root,
            generation_config={},
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            weights_bytes=self.weights_bytes,
            lines=self.lines,
            install=install,
            discard=discard,
        )

    def close(self) -> None:
        """Nothing is open."""


@contextlib.contextmanager
def rollouts_of(house: House, log: Path) -> Generator[ScriptedSource]:
    """The house's rollouts, with versions of a source that is yielded.

    Args:
        log: where decisions go; what is there already is of the last process.
    """
    source = ScriptedSource(house)

    def make_model(new: NewVersion, engine: AsyncEngine) -> ServedModel:
        assert house.state.model is not None
        return dataclasses.replace(
            house.state.model,
            engine=engine,
            version=new.name,
            root=new.root,
            pool=ThreadPoolExecutor(1),
            grammar_pool=ThreadPoolExecutor(1),
        )

    def start() -> Rollouts:
        book = RolloutLog(log)
        rollouts = Rollouts(
            house.state,
            VersionOrder(ModelSource("tests/letters")),
            source=source,
            log=book,
            make_engine=AsyncEngine,
            make_model=make_model,
            before=before_this_start(book.records(), "v1"),
        )
        house.state.rollouts = rollouts
        rollouts.start()
        return rollouts

    rollouts = house.on_loop(start)
    try:
        yield source
    finally:
        asyncio.run_coroutine_threadsafe(rollouts.close(), house.loop).result(10)
