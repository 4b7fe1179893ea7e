"""A model of another shape, format or architecture beside the one that serves: both are exact, and
neither a failure nor the end of the second is noticed by the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig, SamplingParams, replace
from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError, EngineFailure, PoolLost
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.new_version import NewVersion
from jaxinfer.offline import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.request_stream import RequestStream
from jaxinfer.runtime import aot
from jaxinfer.runtime.memory_budget import ROOT, MemoryBudget, resident_bytes
from jaxinfer.runtime.memory_plan import MemoryPlan, default_dtype
from jaxinfer.runtime.program_set import ProgramSet, prepare_beside
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.runtime.weight_choice import choose_weights
from jaxinfer.runtime.weights import load_weights
from jaxinfer.scheduling.request import Request
from jaxinfer.second_engine import load_engine
from jaxinfer.tokenizer import Tokenizer
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, shared_cache, tiny_llm

UNKNOWN = MemoryBudget(None, 0, None)
PROMPTS = (5, 6, 7), (9,) * 20, tuple(range(40))
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, n=2, frequency_penalty=0.5, max_tokens=9, logprobs=0),
)
Answer = list[tuple[int, bytes]]
Answers = dict[tuple[str, int], Answer]
"""By request and choice: each token, and the bits of its log-probability."""

MODELS: dict[str, dict[str, Any]] = {
    "other": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": 320,
    },
    "int8": {"quantization": Quantization(WeightFormat(8))},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
"""`other` differs in all: architecture, width, depth, context; it is rounded while it is loaded."""
OTHERS = ["other", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "gemma3"))]


class World:
    """An engine that serves, and other models' files."""

    def __init__(self, factory: pytest.TempPathFactory):
        self._factory = factory
        self.llm = tiny_llm(factory)
        self.built = self.llm._built
        self._paths: dict[str, Path] = {}
        self._own: dict[str, Answers] = {}
        self.says = answers(self.built.engine)

    def config(self, name: str, **fields: Any) -> EngineConfig:
        if name not in self._paths:
            folder = self._factory.mktemp(name)
            self._paths[name] = write_checkpoint(folder, seed=4, **MODELS[name])
        cache = shared_cache(self._factory)
        config = tiny_engine_config(self._paths[name], cache, max_kl=float("inf"), **SMALL)
        fields = {"quantization": "int8"} | fields if name == "other" else fields
        return replace(config, **fields)

    def own_answers(self, name: str) -> Answers:
        """Of an LLM that has the process to itself."""
        if name not in self._own:
            self._own[name] = answers(LLM(config=self.config(name))._built.engine)
        return self._own[name]

    def load(
        self,
        name: str = "other",
        *,
        budget: MemoryBudget = UNKNOWN,
        load: Callable[[Checkpoint, Decoder], Any] = load_weights,
        on_progress: Callable[[str], None] = lambda phase: None,
        **fields: Any,
    ) -> NewVersion:
        """`fields` are of the engine's config. What it compiles is of a version."""
        config, before = self.config(name, **fields), self.llm.compile_events()
        checkpoint = open_checkpoint(Path(config.source.model))
        with contextlib.closing(checkpoint):
            choice = choose_weights(config.source, checkpoint, is_int8_fast=False)
            dtype = default_dtype(config.source.dtype)
            new = load_engine(
                config,
                checkpoint,
                choice,
                decoder_for(checkpoint.config, dtype=dtype, quantization=choice.quantization),
                Tokenizer.of(checkpoint, None),
                budget,
                programs_dir=Path(str(config.cache_dir)) / "programs",
                running_model_len=self.built.max_model_len,
                load=load,
                on_progress=on_progress,
            )
        (told,) = (line for line in new.lines if line.startswith("programs: "))
        num_compiled = int(told.split()[-2])
        events = before | {"version": before["version"] + num_compiled}
        assert self.llm.compile_events() == events
        return new

    @contextlib.contextmanager
    def undisturbed(self) -> Generator[None]:
        """What happens inside leaves nothing on the device, and the first engine as it was."""
        gc.collect()  # errors of other tests
        before, num_compiled = live(), self.num_serving
        yield
        gc.collect()  # errors refer to themselves
        assert live() == before
        assert answers(self.built.engine) == self.says
        assert self.num_serving == num_compiled

    @property
    def num_serving(self) -> int:
        """Compilations that the first engine has to be ashamed of: an LLM of a test is one, too."""
        return self.llm.compile_events()["serving"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory)


def live() -> tuple[int, int]:
    """Arrays on the device, and their bytes."""
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def requests() -> list[Request]:
    return [
        Request(f"{i}-{j}", prompt, sampling, arrival_s=time.monotonic())
        for i, sampling in enumerate(SAMPLINGS)
        for j, prompt in enumerate(PROMPTS)
    ]


def note(said: Answers, output: RequestOutput) -> None:
    assert output.error is None
    answer = said.setdefault((output.request_id, output.index), [])
    answer += ((e.token_id, np.float32(e.logprob).tobytes()) for e in output.logprobs)


def answers(engine: Engine) -> Answers:
    """To all prompts in all ways, side by side."""
    said: Answers = {}
    for request in requests():
        engine.submit(request)
    while engine.has_work():
        for output in engine.step().outputs:
            note(said, output)
    assert engine.pool_stats().pages_used == 0
    return said


async def answers_of(stream: RequestStream) -> Answers:
    said: Answers = {}
    async for output in stream:
        note(said, output)
    return said


async def side_by_side(*engines: Engine) -> list[Answers]:
    """The same through their threads, which begin when all requests are there."""
    running = [AsyncEngine(engine) for engine in engines]
    for engine in running:
        engine.start()
        await engine.hold(5)
    try:
        streams = [engine.submit(*requests()) for engine in running]
        for engine in running:
            engine.release()
        return await asyncio.gather(*map(answers_of, streams))
    finally:
        for engine in running:
            await engine.close()


@pytest.mark.parametrize("name", OTHERS)
def test_two_models_answer_at_once_each_as_if_it_were_alone(world: World, name: str):
    world.load(name).discard()
    own = world.own_answers(name)  # with what was compiled for the second engine
    with world.undisturbed():
        new = world.load(name)
        assert new.engine is not None
        first, second = asyncio.run(side_by_side(world.built.engine, new.engine))
        assert (first, second) == (world.says, own)
        assert first != second
        new.discard()


def test_what_is_new_is_told(world: World):
    phases: list[str] = []
    new = world.load(on_progress=phases.append)
    engine, config = new.engine, world.config("other")
    assert engine is not None
    assert (new.manner, new.root, new.name) == ("engine", config.source.model, engine.version)
    assert new.name != world.built.version
    assert (new.max_model_len, engine.max_total_tokens) == (320, 320)
    assert new.vocab_size == engine.vocab_size
    assert new.generation_config == {}
    assert new.model_version.tokenizer is not None
    assert new.model_version.tokenizer is not world.built.tokenizer
    assert phases[0] == "compile"
    assert phases[-2:] == ["load weights", "allocate KV pool"]
    assert set(phases[1:-2]) == {
        *(f"program {name}" for name in world.built.runner._programs.by_name),
        "program kv_pages",
    }
    assert new.lines[0] == "int8 by rounding: no certificate, cost unknown"
    assert new.lines[1].startswith("an engine of its own: weights 0 MiB + programs ")
    assert new.lines[2].startswith("programs: ")
    assert new.lines[3:] == ("it holds sequences of 320 tokens, the running engine of 640",)
    with pytest.raises(ValueError, match="not installed in another"):
        new.install(world.built.engine)
    new.discard()


def test_load_and_discard_leave_not_a_byte_however_often(world: World):
    """In the middle of a step of a request that nobody reads any more, and twice."""
    with world.undisturbed():
        before = live()
        for _ in range(3):
            new = world.load()
            assert new.engine is not None
            assert live()[1] > before[1] + new.weights_bytes
            for request in requests():
                new.engine.submit(request)
            for _ in range(3):
                new.engine.step()
            new.discard()
            new.discard()
            assert live() == before


@pytest.mark.slow
def test_resident_memory_comes_back(world: World):
    after: list[int] = []
    for _ in range(24):
        new = world.load()
        new.discard()
        after.append(resident_bytes(ROOT))
    assert after[-1] - after[7] < 16 * 2**20  # a load takes some 40 MiB


def test_a_discarded_engine_says_so_and_hurts_nobody(
    world: World, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)  # a record of a log would keep the error's arrays
    with world.undisturbed():
        new = world.load()
        assert new.engine is not None
        new.discard()
        with pytest.raises(EngineFailure, match="the runner is closed"):
            answers(new.engine)


def bad_weights(checkpoint: Checkpoint, decoder: Decoder) -> Any:
    params = load_weights(checkpoint, decoder)
    assert live()[1] > 0
    raise CheckpointError(f"{checkpoint.path}: {len(params)} groups hold NaN")


def no_program(self: aot.Program) -> Any:
    raise RuntimeError("the compiler has no memory")


def test_weights_that_are_refused_leave_nothing(world: World):
    with world.undisturbed():
        before = live()
        with pytest.raises(CheckpointError, match="hold NaN") as caught:
            world.load(load=bad_weights)
        assert caught.tb is not None
        assert live() == before  # who keeps the error keeps no array


def test_a_program_that_cannot_be_compiled_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with world.undisturbed():
        monkeypatch.setattr(aot.Program, "compile", no_program)
        with pytest.raises(RuntimeError, match="the compiler has no memory"):
            world.load(cache_dir=str(tmp_path))


def test_who_gives_up_while_the_pool_is_made_leaves_nothing(world: World):
    def give_up(phase: str) -> None:
        if phase == "allocate KV pool":
            raise KeyboardInterrupt

    with world.undisturbed(), pytest.raises(KeyboardInterrupt):
        world.load(on_progress=give_up)


def test_settings_that_cannot_work_leave_nothing(world: World):
    with world.undisturbed(), pytest.raises(ConfigError, match="at least"):
        world.load(max_num_batched_tokens=4)


def test_no_room_is_told_with_what_is_missing(world: World):
    phases: list[str] = []
    with world.undisturbed(), pytest.raises(ConfigError, match=r"100 are left: \d+ are missing"):
        world.load(budget=MemoryBudget(1100, 1000, None), on_progress=phases.append)
    assert phases == ["compile"]


@pytest.mark.slow
def test_with_less_room_the_pool_is_smaller_and_that_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    plans: list[MemoryPlan] = []

    def spied(*args: Any, **fields: Any) -> ProgramSet:
        found = prepare_beside(*args, **fields)
        plans.append(found.plan)
        return found

    monkeypatch.setattr("jaxinfer.second_engine.prepare_beside", spied)
    world.load().discard()
    whole = plans[0]
    assert whole.num_pages == 160
    room = MemoryBudget(whole.total_bytes - 30 * whole.page_bytes, 0, None)
    with world.undisturbed():
        new = world.load(budget=room)
        assert new.engine is not None
        assert plans[1].total_bytes <= whole.total_bytes - 30 * whole.page_bytes
        assert 20 <= plans[1].num_pages == new.engine.pool_stats().pages_total <= 130
        told = f"its KV pool has {plans[1].pool_bytes} of the {whole.pool_bytes} bytes that were"
        assert any(line.startswith(told) for line in new.lines)
        new.discard()


def lose_pages(runner: ModelRunner) -> None:
    for array in jax.tree.leaves(runner._pages):
        array.delete()


def fail(runner: ModelRunner) -> None:
    raise RuntimeError("a step that fails")


def lose_and_say_so(runner: ModelRunner) -> None:
    raise PoolLost("the pool is gone")


HARMS = {2: lose_pages, 9: fail, 16: lose_and_say_so}
"""By number of the step."""


def test_what_happens_to_the_second_does_not_happen_to_the_first(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)
    own = world.own_answers("other")
    with world.undisturbed():
        new = world.load()
        assert new.engine is not None
        runner = new.engine._runner
        assert isinstance(runner, ModelRunner)
        dispatch, num_steps = runner.dispatch, 0

        def harmed(batch: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps in HARMS:
                HARMS[num_steps](runner)
            return dispatch(batch)

        monkeypatch.setattr(runner, "dispatch", harmed)
        rebuilds = count_rebuilds(world.built.runner, monkeypatch)
        first, second = asyncio.run(side_by_side(world.built.engine, new.engine))
        assert (first, second) == (world.says, own)
        assert num_steps > max(HARMS)
        assert rebuilds == []
        new.discard()


def count_rebuilds(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(runner, "rebuild", lambda: found.append(time.monotonic()))
    return found
