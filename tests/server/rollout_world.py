"""Rollouts over the scripted engine, without HTTP and with a clock that stands still.

A version is ordered by its name: `World.source` is told how it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import ModelSource, SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.guidance import Guidance
from jaxinfer.new_version import Manner, NewVersion
from jaxinfer.rollout import RolloutPlan, Stage
from jaxinfer.rollout_log import RolloutLog
from jaxinfer.scheduling.request import Request
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.rollouts import Rollouts
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.state import Limits, ServerState
from jaxinfer.version_order import VersionOrder
from jaxinfer.versions import ModelVersion
from tests.fakes import FakeClock
from tests.server.house import MAX_MODEL_LEN, CountingRunner, make_engine

HALF = RolloutPlan(stages=(Stage(0.5, hold_s=60.0),))
ALL_BUT_PROMOTED = RolloutPlan(stages=(Stage(1.0, hold_s=0.0),), promotes=False)


@dataclass
class Way:
    """How a version comes. A gate that is shut holds the thread there."""

    manner: Manner = "beside"
    shift: int = 1  # letters that it leaves out
    open_error: Exception | None = None
    load_error: Exception | None = None
    install_error: Exception | None = None
    is_crowded: bool = False  # it is not found only as long as there are two others
    has_logits: bool = True  # False: they are not numbers
    may_open: threading.Event = field(default_factory=threading.Event)
    may_load: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_open.set()
        self.may_load.set()


@dataclass
class FakeOpened:
    """An OpenVersion."""

    name: str
    way: Way
    source: FakeSource
    root: str = "tests/opened"
    weights_bytes: int = 7
    lines: tuple[str, ...] = ("tiny",)

    @property
    def manner(self) -> Manner:
        return self.way.manner

    def load(self, on_progress: Callable[[str], None]) -> NewVersion:
        on_progress(f"reading {self.name}")
        assert self.way.may_load.wait(10)
        if self.way.load_error is not None:
            raise self.way.load_error
        self.source.loaded.append(self.name)
        return self.source.new_version(self)

    def close(self) -> None:
        self.source.closed.append(self.name)


class FakeSource:
    """A VersionSource over one engine."""

    def __init__(self, core: Engine, runner: CountingRunner, tokenizer: Any):
        self.ways: dict[str, Way] = {}
        self.runners: dict[str, CountingRunner] = {}  # of versions with an engine of their own
        self.loaded: list[str] = []
        self.closed: list[str] = []
        self.discarded: list[str] = []
        self._core, self._runner, self._tokenizer = core, runner, tokenizer

    def open(self, order: VersionOrder, on_progress: Callable[[str], None]) -> FakeOpened:
        name = order.source.model
        way = self.ways.get(name)
        if way is None:
            raise CheckpointError(f"{name}: expected a folder, found nothing there")
        assert way.may_open.wait(10)
        if way.open_error is not None and not (way.is_crowded and len(self._core.versions) < 2):
            raise way.open_error
        if order.swap_mode == "stream":
            way = dataclasses.replace(way, manner="stream")
        return FakeOpened(name, way, self)

    def new_version(self, opened: FakeOpened) -> NewVersion:
        way, name = opened.way, opened.name
        version = ModelVersion(name, self._tokenizer, self._tokenizer.eos_token_ids)
        core, runner = None, self._runner
        if way.manner == "engine":
            core, runner, _, _ = make_engine(version=name)
            self.runners[name] = runner
        runner.shifts[name] = way.shift
        if not way.has_logits:
            runner.not_numbers.add(name)

        def install(engine: Engine) -> None:
            if way.install_error is not None:
                raise way.install_error
            if way.manner == "stream":
                assert engine.is_still
            before = engine.version
            if name not in engine.versions:  # else it is the same one, read again
                engine.add_version(version)
            if way.manner == "stream" and before != name:
                engine.serve_version(name)
                engine.drop_version(before)

        return NewVersion(
            model_version=version,
            manner=way.manner,
            root=opened.root,
            generation_config={},
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self._tokenizer.vocab_size,
            weights_bytes=opened.weights_bytes,
            lines=opened.lines,
            install=install,
            discard=lambda: self.discarded.append(name),
            engine=core,
        )


@dataclass
class World:
    """What a test looks at."""

    state: ServerState
    engine: AsyncEngine
    core: Engine
    runner: CountingRunner
    source: FakeSource
    rollouts: Rollouts
    clock: FakeClock
    log_path: Path
    _number: int = 0

    async def order(self, name: str, plan: RolloutPlan = HALF, **options: Any) -> None:
        order = VersionOrder(ModelSource(name))
        await self.rollouts.begin(order, plan, **options)

    async def canary(self, name: str = "v2", plan: RolloutPlan = HALF, **way: Any) -> None:
        """Orders one and waits until it gets calls."""
        self.source.ways[name] = Way(**way)
        await self.order(name, plan)
        await until(lambda: self.role(name) in ("canary", "stable"))

    async def say(self, prompt: str = "a", *, pinned: str | None = None, num: int = 3) -> str:
        """A call, from the door to its last token. "a" is answered by "bcd", by v2 with "ceg"."""
        self._number += 1
        await self.state.door.go_through()
        model = self.state.versions.choose(f"caller-{self._number}", pinned)
        request = Request(
            f"r{self._number}",
            tuple(model.tokenizer.encode(prompt)),
            SamplingParams(max_tokens=num, temperature=0.0),
            arrival_s=time.monotonic(),
            version=model.version,
        )
        with self.state.versions.call(model):
            text = ""
            async for output in model.engine.submit(request):
                text += output.text
                if output.error is not None:
                    raise output.error
            return text

    def role(self, name: str) -> str | None:
        roles = {v["version"]: v["role"] for v in self.rollouts.status()["versions"]}
        return roles.get(name)

    @property
    def phase(self) -> str:
        return self.rollouts.status()["rollout"]["phase"]

    @property
    def reason(self) -> str:
        return self.rollouts.status()["rollout"]["reason"]

    def records(self) -> list[dict[str, Any]]:
        """Of the log file, as it is on the disk."""
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def world(log_path: Path, **options: Any) -> AsyncGenerator[World]:
    """v1 serves. At the end nothing may be left that somebody looks after."""
    core, runner, _, tokenizer = make_engine()
    state = ServerState(Limits(), Metrics("letters"))
    engine = AsyncEngine(core, on_verdict=state.note_step)
    engine.start()
    source = FakeSource(core, runner, tokenizer)
    clock = FakeClock(1000.0)

    def make_model(new: NewVersion, of: AsyncEngine) -> ServedModel:
        return served(new.name, of, tokenizer)

    state.become_ready(served("v1", engine, tokenizer))
    rollouts = Rollouts(
        state,
        VersionOrder(ModelSource("v1")),
        source=source,
        log=RolloutLog(log_path),
        make_engine=lambda core: AsyncEngine(core, on_verdict=state.note_step),
        make_model=make_model,
        clock=clock,
        wall_clock=lambda: 0.0,
        **options,
    )
    state.rollouts = rollouts
    try:
        yield World(state, engine, core, runner, source, rollouts, clock, log_path)
    finally:
        runner.gate.set()
        for way in source.ways.values():
            way.may_open.set()
            way.may_load.set()
        await rollouts.close()
        await state.close()
        await until(lambda: not rollouts.is_busy)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"somebody is still at work: {left}"


def served(name: str, engine: AsyncEngine, tokenizer: Any) -> ServedModel:
    return ServedModel(
        engine=engine,
        tokenizer=tokenizer,
        names=("letters",),
        root=f"tests/{name}",
        max_model_len=MAX_MODEL_LEN,
        version=name,
        defaults={},
        pool=ThreadPoolExecutor(1),
        guidance=Guidance(tokenizer, tokenizer.vocab_size),
    )


def run(scenario: Callable[..., Coroutine[Any, Any, None]], path: Path, **options: Any) -> None:
    """Runs a test in a world of its own, for at most 20 s."""

    async def bounded() -> None:
        async with world(path / "rollouts.jsonl", **options) as found:
            await asyncio.wait_for(scenario(found), 20)

    asyncio.run(bounded())
