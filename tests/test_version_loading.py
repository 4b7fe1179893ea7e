"""New versions of the weights: found, checked, placed, served, let go; the running one never
notices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat
from jaxinfer import fitting_version, own_engine_version
from jaxinfer.build import Built, build
from jaxinfer.config import EngineConfig, ModelSource, SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError, Conflict, EngineFailure, InvalidRequest
from jaxinfer.found_model import find_model
from jaxinfer.new_version import Manner, NewVersion, OpenVersion
from jaxinfer.runtime import memory_plan
from jaxinfer.runtime.low_priority import LOWEST, at_low_priority
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import MemoryPlan
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.scheduling.request import Request
from jaxinfer.version_loading import VersionLoading
from jaxinfer.version_order import SwapMode, VersionOrder
from jaxinfer.versions import ModelVersion
from pallas_kernels.backend import REFERENCE
from tests.certificates import certified
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, shared_cache

PROMPTS = (5, 6, 7), (9,) * 20, tuple(range(40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
WEIGHTS = "model.safetensors"
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


def free(built: Built) -> None:
    """At once, not when Python gets to it."""
    runner = built.runner
    for array in jax.tree.leaves((runner._params, runner._pages, runner._newest)):
        array.delete()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("versions")
    models = [write_checkpoint(folder / name, seed=seed) for seed, name in enumerate("ab")]
    builts = [
        build(tiny_engine_config(model, shared_cache(tmp_path_factory), **SMALL))
        for model in models
    ]
    says = {each.version: answers(each.engine, None)[0] for each in builts}
    assert len(says) == 2
    free(builts[1])
    return World(builts[0], models[0], models[1], says)


@pytest.fixture
def kept(world: World) -> Iterator[World]:
    """Checks that the running version says afterwards what it said, and nothing else is left."""
    before = live_bytes()
    yield world
    engine = world.engine
    assert (engine.version, engine.versions) == (world.built.version, (world.built.version,))
    assert answers(engine, None) == [world.says[engine.version]]
    assert live_bytes() == before
    assert world.built.memory_bytes["weights"] == world.built.plan.weights_bytes
    assert world.built.compile_events()["serving"] == 0


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


def drop(world: World, version: str) -> None:
    world.engine.drop_version(version)
    while world.engine.has_work():
        world.engine.step()


def test_two_versions_under_way_at_once_say_each_what_it_says_alone(kept: World):
    phases: list[str] = []
    opened = kept.open(kept.theirs)
    assert (opened.name, opened.manner, opened.root) == (kept.other, "beside", str(kept.theirs))
    version = opened.load(phases.append)
    assert phases == ["compare checksums", "read and check weights"]
    assert version.name == kept.other
    assert version.max_model_len == kept.built.max_model_len
    assert version.vocab_size == kept.engine.vocab_size
    size = kept.built.plan.weights_bytes
    assert version.weights_bytes == size
    assert kept.built.memory_bytes["weights"] == 2 * size
    assert kept.engine.versions == (kept.built.version,)
    version.install(kept.engine)
    version.discard()  # is the engine's now
    assert kept.engine.version == kept.built.version
    both = answers(kept.engine, kept.built.version, kept.other, None)
    ours, theirs = kept.says[kept.built.version], kept.says[kept.other]
    assert both == [ours, theirs, ours]
    assert kept.built.version_source.source_of(kept.other).model == str(kept.theirs)
    drop(kept, kept.other)
    with pytest.raises(ConfigError, match="expected a version that is loaded"):
        kept.built.version_source.source_of(kept.other)


def test_a_load_beside_running_requests_changes_nothing_of_them(kept: World):
    opened = kept.open(kept.theirs)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(opened.load, lambda phase: None)
        while not loading.done():
            assert answers(kept.engine, None) == [kept.says[kept.built.version]]
    loading.result().discard()


def test_twenty_cycles_of_load_and_drop_leave_nothing_behind(kept: World):
    before = live_bytes()
    for _ in range(20):
        kept.load(kept.theirs).install(kept.engine)
        assert answers(kept.engine, kept.other) == [kept.says[kept.other]]
        drop(kept, kept.other)
        assert live_bytes() == before


def test_a_version_that_is_discarded_leaves_nothing_behind(kept: World):
    version = kept.load(kept.theirs)
    version.discard()
    version.discard()
    with pytest.raises(Conflict, match="installed or discarded"):
        version.install(kept.engine)


@pytest.mark.parametrize("swap_mode", ["beside", "stream"])
def test_the_version_that_runs_is_loaded_again(kept: World, swap_mode: SwapMode):
    own = kept.built.version
    source = kept.built.version_source.source_of(own)
    order = VersionOrder(source, expected_version=own, swap_mode=swap_mode)
    opened = kept.built.version_source.open(order)
    assert opened.name == own
    arrays = jax.tree.leaves(kept.built.runner._params[own])
    opened.load(lambda phase: None).install(kept.engine)
    assert all(array.is_deleted() for array in arrays)


def test_a_version_that_is_being_let_go_comes_back(kept: World):
    kept.load(kept.theirs).install(kept.engine)
    kept.engine.submit(Request("r", (1, 2), GREEDY, version=kept.other))
    kept.engine.step()
    kept.engine.drop_version(kept.other)
    with pytest.raises(InvalidRequest, match="takes no requests"):
        kept.engine.submit(Request("s", (1, 2), GREEDY, version=kept.other))
    kept.load(kept.theirs).install(kept.engine)
    assert answers(kept.engine, kept.other) == [kept.says[kept.other]]
    drop(kept, kept.other)


def test_another_version_takes_the_place_of_the_current_one_and_gives_it_back(kept: World):
    version = kept.load(kept.theirs, "stream")
    assert version.manner == "stream"
    assert kept.built.memory_bytes["weights"] == kept.built.plan.weights_bytes
    version.install(kept.engine)
    assert kept.engine.version == kept.other
    assert kept.engine.versions == kept.built.runner.versions == (kept.other,)
    assert answers(kept.engine, None) == [kept.says[kept.other]]
    kept.load(kept.ours, "stream").install(kept.engine)


def test_nothing_is_replaced_under_a_living_request(kept: World):
    version = kept.load(kept.theirs, "stream")
    kept.engine.submit(Request("r", (1, 2), GREEDY))
    with pytest.raises(Conflict, match="drain first"):
        version.install(kept.engine)
    kept.engine.abort("r")
    version.discard()


def test_a_file_that_was_written_after_the_check_changes_nothing(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    version = kept.load(model, "stream")
    os.utime(model / WEIGHTS, (1, 1))
    with pytest.raises(CheckpointError, match="found it written since"):
        version.install(kept.engine)


NUM_WEIGHTS = 2 + 2 * 9  # embedding, norm, and of two layers


def test_a_swap_that_fails_at_any_tensor_is_undone(kept: World, tmp_path: Path):
    for place in range(NUM_WEIGHTS):
        model = changed(kept.theirs, tmp_path / str(place), lambda tensors: None)
        version = kept.load(model, "stream")
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, place, partial(os.truncate, model / WEIGHTS, 100))
            is_last = place == NUM_WEIGHTS - 1
            message = "found it written since" if is_last else "cut short while it was read"
            with pytest.raises(CheckpointError, match=message):
                version.install(kept.engine)
        if place in (0, NUM_WEIGHTS // 2):
            assert answers(kept.engine, None) == [kept.says[kept.built.version]]


def break_at(patch: pytest.MonkeyPatch, place: int, damage: Callable[[], None]) -> None:
    """Calls `damage` when so many tensors have been replaced, once."""
    import jaxinfer.runtime.streamed_weights as module

    num_put, device_put = 0, jax.device_put

    def put(array: np.ndarray) -> jax.Array:
        nonlocal num_put
        if num_put == place:
            damage()
        num_put += 1
        return device_put(array)

    patch.setattr(module.jax, "device_put", put)


def test_a_swap_that_cannot_be_undone_says_that_only_a_restart_helps(
    world: World,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    ours = changed(world.ours, tmp_path / "ours", lambda tensors: None)
    model = changed(world.theirs, tmp_path / "m", lambda tensors: None)
    built = build(tiny_engine_config(ours, shared_cache(tmp_path_factory), **SMALL))
    own = dataclasses.replace(world, built=built)
    version = own.load(model, "stream")

    def lose() -> None:
        os.truncate(model / WEIGHTS, 100)
        (ours / WEIGHTS).unlink()

    break_at(monkeypatch, 3, lose)
    with pytest.raises(EngineFailure) as caught:
        version.install(built.engine)
    free(built)
    assert "could not be read again" in str(caught.value)
    assert "restart the server" in str(caught.value)


def cut(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP] = tensors[UP][:-1]


def not_a_number(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP][3, 3] = np.nan


def infinite_norm(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"][0] = np.inf


def integers(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP] = tensors[UP].astype(np.int32)


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "missing": (lambda t: t.pop(UP), f"expected 1 tensor {UP!r}, found 19 tensors without"),
    "extra": (lambda t: t.update(x=t[UP]), "found also 1 tensor 'x'"),
    "shape": (cut, rf"tensor {UP!r} has shape \(79, 48\), the model needs \(80, 48\)"),
    "dtype": (integers, f"tensor {UP!r} has dtype int32, the model needs a floating one"),
    "NaN": (not_a_number, f"tensor {UP!r}: expected finite numbers of float32, found NaN"),
    "infinity": (infinite_norm, "tensor 'model.norm.weight': expected finite numbers"),
}


@pytest.mark.parametrize("swap_mode", ["beside", "stream"])
@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_tensors_that_are_wrong_are_refused_by_name(
    kept: World, tmp_path: Path, fault: str, swap_mode: SwapMode
):
    change, message = BAD_TENSORS[fault]
    model = changed(kept.theirs, tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        kept.load(model, swap_mode)
    assert str(caught.value).startswith(str(model))


def test_a_path_without_a_model_is_refused(kept: World, tmp_path: Path):
    with pytest.raises(CheckpointError, match="expected an existing file or folder"):
        kept.open(tmp_path / "no such")
    with pytest.raises(CheckpointError, match="found neither"):
        kept.open(tmp_path)


def test_a_truncated_file_is_refused(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 1)
    with pytest.raises(CheckpointError, match="expected a whole safetensors file"):
        kept.open(model)


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    opened = kept.open(model)
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size // 2)
    with pytest.raises(CheckpointError, match="it was cut short while it was read"):
        opened.load(lambda phase: None)


def test_a_file_that_is_written_while_it_is_read_is_refused(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    opened = kept.open(model)
    with (model / WEIGHTS).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0" * 4)
    with pytest.raises(CheckpointError, match="found it written since"):
        opened.load(lambda phase: None)


def test_an_architecture_that_nobody_knows_is_refused(kept: World, tmp_path: Path):
    model = reconfigured(kept.theirs, tmp_path / "m", architectures=["MambaForCausalLM"])
    with pytest.raises(CheckpointError, match="got MambaForCausalLM"):
        kept.open(model)


def test_other_content_than_was_expected_is_refused(kept: World):
    message = f"expected the version {'0' * 16}, found {kept.other}; give the files"
    with pytest.raises(CheckpointError, match=message):
        kept.open(kept.theirs, expected="0" * 16)
    kept.open(kept.theirs, expected=kept.other).close()


def write_sums(model: Path, **wrong: str) -> None:
    sums = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in model.iterdir()}
    lines = [f"{digest}  {name}\n" for name, digest in (sums | wrong).items()]
    (model / "SHA256SUMS").write_text("".join(lines))


def test_checksums_beside_the_weights_are_compared(kept: World, tmp_path: Path):
    model = changed(kept.theirs, tmp_path / "m", lambda tensors: None)
    write_sums(model)
    kept.load(model).discard()
    write_sums(model, **{WEIGHTS: "0" * 64})
    opened = kept.open(model)
    with pytest.raises(CheckpointError, match=f"expected SHA-256 {'0' * 64} by SHA256SUMS, found"):
        opened.load(lambda phase: None)


INT8 = Quantization(WeightFormat(8))
RUNNER: dict[str, Any] = {"layer_kinds": (), "num_seats": 8, "make_pages": list, "vocab_size": 1}


def quantized(folder: Path, *, kl: float | None = 0.003, of: str | None = None) -> Path:
    model = write_checkpoint(folder, seed=1, quantization=INT8)
    if kl is not None:
        certify(model, kl=kl, of=of)
    return model


def certify(model: Path, *, kl: float = 0.003, of: str | None = None) -> None:
    version = of or open_checkpoint(model).version
    (model / "certificate.json").write_text(json.dumps(certified(version, kl).to_json()))


@pytest.mark.parametrize(
    ("certificate", "message"),
    [
        ({"kl": None}, r"expected a certificate of these weights \(\w+\), found none"),
        ({"of": "0" * 16}, f"found one of {'0' * 16}"),
        ({"kl": 0.2}, "expected a KL divergence of at most 0.05 nats"),
    ],
)
def test_weights_that_cost_too_much_are_refused(
    kept: World, tmp_path: Path, certificate: dict[str, Any], message: str
):
    with pytest.raises(CheckpointError, match=message):
        kept.open(quantized(tmp_path / "m", **certificate))


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, kept: World):
    """Of int8 beside int8; no program of theirs is there, and none is needed."""
    good = quantized(tmp_path / "good")
    built, cache_dir = kept.built, tmp_path / "cache"
    found = find_model(ModelSource(str(good)), REFERENCE, cache_dir, show_progress=False)
    config, first = built.version_source._config, {found.version: {}}
    runner = ModelRunner(first, [], built.runner._programs, **RUNNER)
    loading = VersionLoading(config, found, runner, built.plan, cache_dir=cache_dir, programs="")

    def load(model: Path, **fields: Any) -> NewVersion:
        order = VersionOrder(ModelSource(str(model), **fields))
        return loading.open(order).load(lambda phase: None)

    version = load(good)
    assert version.lines[0].startswith("int8 by nearest: KL 0.003")
    version.discard()

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.mlp.up_proj.scale"][0, 2] = np.nan

    bad = changed(good, tmp_path / "bad", spoil)
    with pytest.raises(CheckpointError, match=r"up_proj.scale' has nan at \(0, 2\)"):
        load(bad, max_kl=np.inf)
    rounded = changed(kept.theirs, tmp_path / "rounded", not_a_number)
    with pytest.raises(CheckpointError, match=f"tensor {UP!r}: expected finite numbers"):
        load(rounded, quantization="int8")
    runner._newest.delete()


def test_weights_of_two_bytes_become_what_a_start_makes_of_them(
    kept: World, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}

    model = changed(kept.theirs, tmp_path / "m", halve)
    alone = build(tiny_engine_config(model, shared_cache(tmp_path_factory), **SMALL))
    said, name = answers(alone.engine, None), alone.version
    free(alone)
    kept.load(model).install(kept.engine)
    assert answers(kept.engine, name) == said
    drop(kept, name)


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_version_without_room_is_refused_with_what_is_missing(
    kept: World, monkeypatch: pytest.MonkeyPatch, is_gpu: bool
):
    plan, loaded = kept.built.plan, kept.built.version_source._loaded
    size = plan.weights_bytes
    if is_gpu:
        budget = MemoryBudget(plan.programs_bytes + plan.pool_bytes + 2 * size - 1, 0, 1 << 40)
        monkeypatch.setattr(loaded, "plan", dataclasses.replace(plan, budget=budget))
        needed, free = size, size - 1
    else:
        monkeypatch.setattr(memory_plan, "free_bytes", lambda root: 1000)
        needed, free = (
            size + fitting_version.spare_bytes(loaded.origin_of(kept.built.version).decoder),
            1000,
        )
    with pytest.raises(ConfigError) as caught:
        kept.open(kept.theirs)
    assert (
        f"version {kept.other} of {kept.theirs} needs {needed} bytes beside what is loaded, but "
        f"{free} are free: {needed - free} are missing; load it with swap_mode stream"
    ) in str(caught.value)


def test_what_programs_do_not_see_may_differ(kept: World, tmp_path: Path):
    keys = {"bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "float16", "name": "x"}
    keys |= {"max_position_embeddings": 4096, "architectures": ["MistralForCausalLM"]}
    version = kept.load(reconfigured(kept.theirs, tmp_path / "m", **keys))
    assert version.manner == "beside"
    assert {2, 3} <= version.model_version.eos_token_ids
    version.install(kept.engine)
    assert answers(kept.engine, version.name) == [kept.says[kept.other]]
    drop(kept, version.name)


@pytest.mark.parametrize(
    ("keys", "difference"),
    [
        ({"intermediate_size": 96}, "intermediate_size 96 (here 80)"),
        ({"rope_theta": 5e5}, "rope_theta 500000.0 (here 10000.0)"),
        ({"max_position_embeddings": 320}, "a limit of 320 tokens (here 640)"),
    ],
)
def test_what_the_programs_do_not_compute_needs_an_engine_of_its_own(
    kept: World, tmp_path: Path, keys: dict[str, Any], difference: str
):
    model = reconfigured(kept.theirs, tmp_path / "m", **keys)
    opened = kept.open(model)
    assert opened.manner == "engine"
    assert opened.lines == (f"not what the running programs compute: {difference}",)
    opened.close()


@pytest.mark.slow
def test_a_version_with_an_engine_of_its_own_comes_and_goes(kept: World, tmp_path: Path):
    model = quantized(tmp_path / "m")
    before, phases = kept.built.memory_bytes, list[str]()
    version = kept.open(model).load(phases.append)
    assert phases[:2] == ["compare checksums", "compile"]
    assert phases[-2:] == ["load weights", "allocate KV pool"]
    assert version.engine is not None
    [said] = answers(version.engine, None)
    assert said not in kept.says.values()
    after = kept.built.memory_bytes
    assert after["weights"] == before["weights"] + version.weights_bytes
    assert after["kv_pool"] == 2 * before["kv_pool"]
    assert answers(kept.engine, None) == [kept.says[kept.built.version]]
    version.discard()
    assert kept.built.memory_bytes == before


class FakeSecondEngine:
    """In the place of `load_engine`: reads the weights, and plans as the running engine did."""

    def __init__(self, plan: MemoryPlan):
        self.plan = plan
        self.asked: dict[str, Any] = {}

    def __call__(self, config: EngineConfig, *found: Any, **options: Any) -> NewVersion:
        checkpoint, choice, decoder, tokenizer, budget = found
        self.asked = {"config": config, "budget": budget, **options}
        options["on_progress"]("compile")
        params = options["load"](checkpoint, decoder)
        options["on_plan"](self.plan)

        def discard() -> None:
            for array in jax.tree.leaves(params):
                array.delete()

        version = ModelVersion(choice.version, tokenizer, frozenset())
        root, size = config.source.model, decoder.params_bytes
        args = version, "engine", root, {}, 10, 20, size, ("planned",), lambda engine: None
        return NewVersion(*args, discard)


@pytest.fixture
def second(kept: World, monkeypatch: pytest.MonkeyPatch) -> FakeSecondEngine:
    fake = FakeSecondEngine(kept.built.plan)
    monkeypatch.setattr(own_engine_version, "load_engine", fake)
    return fake


def test_an_engine_of_its_own_is_made_of_what_was_found(
    kept: World, second: FakeSecondEngine, tmp_path: Path
):
    model = quantized(tmp_path / "m")
    write_sums(model)
    before, phases = kept.built.memory_bytes, list[str]()
    version = kept.open(model).load(phases.append)
    assert phases == ["compare checksums", "compile"]
    assert version.root == second.asked["config"].source.model == str(model)
    assert second.asked["running_model_len"] == kept.built.max_model_len
    assert version.lines == (
        "not what the running programs compute: int8 weights (here float32)",
        "planned",
    )
    kinds = "weights", "programs", "kv_pool"
    twice = {kind: 2 * size for kind, size in before.items() if kind in kinds}
    assert kept.built.memory_bytes == before | twice
    version.discard()
    assert kept.built.memory_bytes == before
    write_sums(model, **{WEIGHTS: "0" * 64})
    with pytest.raises(CheckpointError, match="expected SHA-256"):
        kept.load(model)


@pytest.mark.usefixtures("second")
def test_an_engine_of_its_own_for_damaged_weights_is_not_kept(kept: World, tmp_path: Path):
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][0] = np.nan

    good = quantized(tmp_path / "good", kl=None)
    bad = changed(good, tmp_path / "bad", spoil)
    certify(bad)
    before = kept.built.memory_bytes
    with pytest.raises(CheckpointError, match=r"'model.norm.weight': expected finite numbers"):
        kept.load(bad)
    assert kept.built.memory_bytes == before


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize("manner", ["beside", "stream", "engine"])
def test_a_load_that_is_given_up_ends_and_leaves_nothing_behind(
    kept: World, tmp_path: Path, manner: Manner
):
    model = quantized(tmp_path / "m") if manner == "engine" else kept.theirs
    opened = kept.open(model, "stream" if manner == "stream" else "beside")
    assert opened.manner == manner

    def give_up(phase: str) -> None:
        if phase in ("read and check weights", "compile"):
            opened.close()

    with pytest.raises(Conflict, match="given up while it was read"):
        opened.load(give_up)


def test_a_thread_of_low_priority_does_not_lower_its_callers():
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = nice()
    assert at_low_priority(nice) in (LOWEST, before)  # a sandbox may forbid it
    assert nice() == before
    with contextlib.suppress(ValueError):
        at_low_priority(lambda: int("x"))
        pytest.fail("no error")
