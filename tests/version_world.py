"""A tiny model that runs, another version of it, and what must be so after whatever was tried."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.checkpoint import open_checkpoint
from checkpoints.formats import Quantization, WeightFormat
from jaxinfer.build import Built, build
from jaxinfer.config import ModelSource, SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.new_version import NewVersion, OpenVersion
from jaxinfer.scheduling.request import Request
from jaxinfer.version_order import SwapMode, VersionOrder
from tests.certificates import certified
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, shared_cache

PROMPTS = (5, 6, 7), (9,) * 20, tuple(range(40))


GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


WEIGHTS = "model.safetensors"


INT8 = Quantization(WeightFormat(8))
UP = "model.layers.1.mlp.up_proj.weight"
Answers = list[list[tuple[int, float]]]


@dataclass
class World:
    """A running model, another of its shape, and what each says alone."""

    built: Built
    ours: Path
    theirs: Path
    says: dict[str, Answers]  # by version

    @property
    def engine(self) -> Engine:
        return self.built.engine

    @property
    def other(self) -> str:
        return next(version for version in self.says if version != self.built.version)

    def open(
        self, model: Path, swap_mode: SwapMode = "beside", expected: str | None = None
    ) -> OpenVersion:
        order = VersionOrder(ModelSource(str(model)), expected, swap_mode)
        return self.built.version_source.open(order)

    def load(self, model: Path, swap_mode: SwapMode = "beside") -> NewVersion:
        return self.open(model, swap_mode).load(lambda phase: None)


def answers(engine: Engine, *versions: str | None) -> list[Answers]:
    """What the versions say to the prompts, all under way at once: tokens and their bits."""
    asked = {
        f"{v} {p}": Request(f"{v} {p}", prompt, GREEDY, version=version)
        for v, version in enumerate(versions)
        for p, prompt in enumerate(PROMPTS)
    }
    said: dict[str, list[tuple[int, float]]] = {name: [] for name in asked}
    for request in asked.values():
        engine.submit(request)
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.error is None
            if output.request_id in said:
                said[output.request_id] += [(t.token_id, t.logprob) for t in output.logprobs]
    assert all(len(tokens) == GREEDY.max_tokens for tokens in said.values())
    return [[said[f"{v} {p}"] for p in range(len(PROMPTS))] for v in range(len(versions))]


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def num_compiled(world: World) -> int:
    """Of the whole process, but for engines of versions' own."""
    return world.built.compile_events()["serving"]


def free(built: Built) -> None:
    """At once, not when Python gets to it."""
    runner = built.runner
    for array in jax.tree.leaves((runner._params, runner._pages, runner._newest)):
        array.delete()


def make_world(factory: pytest.TempPathFactory) -> World:
    folder = factory.mktemp("versions")
    models = [write_checkpoint(folder / name, seed=seed) for seed, name in enumerate("ab")]
    builts = [build(tiny_engine_config(model, shared_cache(factory), **SMALL)) for model in models]
    says = {each.version: answers(each.engine, None)[0] for each in builts}
    assert len(says) == 2
    free(builts[1])
    return World(builts[0], models[0], models[1], says)


@contextmanager
def nothing_left(world: World) -> Generator[World]:
    """Checks that the running version says afterwards what it said, and nothing else is left."""
    before, compiled = live_bytes(), num_compiled(world)
    yield world
    engine = world.engine
    assert (engine.version, engine.versions) == (world.built.version, (world.built.version,))
    assert answers(engine, None) == [world.says[engine.version]]
    assert live_bytes() <= before  # arrays of other tests may go meanwhile
    assert world.built.memory_bytes["weights"] == world.built.plan.weights_bytes
    assert num_compiled(world) == compiled


def changed(model: Path, to: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """A copy of a model with other tensors."""
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / WEIGHTS)
    change(tensors)
    save_file(tensors, to / WEIGHTS)
    return to


def reconfigured(model: Path, to: Path, **keys: Any) -> Path:
    changed(model, to, lambda tensors: None)
    config = json.loads((to / "config.json").read_text()) | keys
    (to / "config.json").write_text(json.dumps(config))
    return to


def not_a_number(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP][3, 3] = np.nan


def drop(world: World, version: str) -> None:
    world.engine.drop_version(version)
    while world.engine.has_work():
        world.engine.step()


def write_sums(model: Path, **wrong: str) -> None:
    sums = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in model.iterdir()}
    lines = [f"{digest}  {name}\n" for name, digest in (sums | wrong).items()]
    (model / "SHA256SUMS").write_text("".join(lines))


def quantized(folder: Path, *, kl: float | None = 0.003, of: str | None = None) -> Path:
    model = write_checkpoint(folder, seed=1, quantization=INT8)
    if kl is not None:
        certify(model, kl=kl, of=of)
    return model


def certify(model: Path, *, kl: float = 0.003, of: str | None = None) -> None:
    version = of or open_checkpoint(model).version
    (model / "certificate.json").write_text(json.dumps(certified(version, kl).to_json()))
