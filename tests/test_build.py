"""From a configuration to an engine: what is compiled, loaded, refused, and always the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import jax
import pytest

from checkpoints.errors import CheckpointError
from jaxinfer import build as build_module
from jaxinfer.build import build, compile_ahead
from jaxinfer.config import EngineConfig, replace
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import FAMILIES
from jaxinfer.offline import LLM
from jaxinfer.runtime import program_set
from jaxinfer.runtime.aot import Program
from jaxinfer.runtime.compile_counter import CompileCounter
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.program_cache import ProgramCache
from jaxinfer.runtime.program_list import ProgramList
from pallas_kernels.backend import Backend
from tests.checkpoints.conftest import (
    as_vocabulary,
    make_model,
    train_byte_level,
    write_folder,
    write_gguf,
)
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, shared_cache, tiny_llm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [9] * 20, list(range(40))]
NUM_SMALL = 3 + 3 + 4 + 1  # begin, layer, end of a prefill and a decode step; samplers; the pool


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Rows 8 and 16."""
    return tiny_llm(tmp_path_factory, {"max_num_seqs": 16, "max_num_batched_tokens": 16})


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


@pytest.fixture
def small(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model of its own, with the session's cache; the smallest set of programs."""
    model = write_checkpoint(tmp_path / "model")
    return tiny_engine_config(model, shared_cache(tmp_path_factory), **SMALL)


def greedy(llm: LLM) -> list[list[int]]:
    return [g.token_ids for g in llm.generate(PROMPTS, **GREEDY)]


def test_a_second_build_loads_every_program_and_gives_the_same_tokens(
    small: EngineConfig, counter: CompileCounter
):
    first = LLM(config=small)
    tokens = greedy(first)
    compiled = counter.count
    second = LLM(config=small)
    assert second._built.summary["programs"] == f"{NUM_SMALL} loaded, 0 compiled"
    assert greedy(second) == tokens
    assert counter.count == compiled
    assert second.compile_events() == {"startup": 0, "serving": 0, "version": 0}


def test_fused_steps_say_the_same(small: EngineConfig):
    fused = LLM(config=replace(small, step_programs="fused"))
    assert fused._built.runner._programs.by_name.keys() == {
        "prefill tokens=16 step",
        "decode rows=8 step",
        *(f"sample rows=8 {variant}" for variant in ("greedy", "plain", "full", "penalized")),
    }
    assert greedy(fused) == greedy(LLM(config=small))


def test_other_buckets_of_the_same_model_say_the_same(small: EngineConfig, llm: LLM):
    assert greedy(LLM(config=small)) == greedy(llm)


def test_what_was_built_is_told(small: EngineConfig):
    phases: list[str] = []
    built = build(small, phases.append)
    assert phases == ["find model", "load weights and compile"]
    assert sorted(built.summary["seconds"]) == [
        "allocate KV pool",
        "compile",
        "find model",
        "load weights",
    ]
    assert built.model_name == small.source.model
    assert built.max_model_len == built.plan.max_model_len == 640
    assert built.summary["num_kv_tokens"] == 80 * 16
    assert built.summary["max_concurrency"] == 2.0
    assert "KV pool 1 MiB (80 pages of 16 tokens) = " in built.summary["memory"]
    assert built.memory_bytes["kv_pool"] == 80 * 16 * 512
    assert {"weights", "programs", "kv_pool"} <= built.memory_bytes.keys()
    assert built.engine.version == built.version
    assert built.engine.vocab_size == built.tokenizer.vocab_size


def test_a_seed_makes_unseeded_requests_repeatable(small: EngineConfig):
    def drawn(seed: int | None) -> list[str]:
        llm = LLM(config=replace(small, seed=seed))
        return [llm.generate("the", max_tokens=16)[0].text for _ in range(2)]

    first = drawn(5)
    assert first[0] != first[1]
    assert drawn(5) == first
    assert drawn(6) != first
    assert drawn(None) != drawn(None)


def test_the_checkpoints_defaults_are_passed_on(small: EngineConfig):
    defaults = {"temperature": 0.2, "top_p": 0.9, "eos_token_id": 3}
    Path(small.source.model, "generation_config.json").write_text(json.dumps(defaults))
    assert build(small).generation_config == defaults


def test_a_chat_template_of_ones_own(small: EngineConfig, tmp_path: Path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    built = build(replace(small, chat_template=str(template)))
    ids = built.tokenizer.encode_chat([{"role": "user", "content": "cat"}])
    assert built.tokenizer.decode(ids) == "[cat]"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_chat_template_that_cannot_be_read_is_refused(
    small: EngineConfig, tmp_path: Path, content: bytes | None
):
    template = tmp_path / "t.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ConfigError, match="chat_template must be a readable Jinja file"):
        build(replace(small, chat_template=str(template)))


def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_read(tmp_path: Path):
    model = write_checkpoint(tmp_path / "model", architectures=["GPT2LMHeadModel"])
    phases: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        build(tiny_engine_config(model, tmp_path / "cache"), phases.append)
    assert str(caught.value) == (
        f"{model}: config.json: architectures must name one of {', '.join(FAMILIES)}; "
        "got GPT2LMHeadModel"
    )
    assert phases == ["find model"]


def test_memory_that_is_not_there_is_refused_before_the_pool_is_allocated(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(program_set, "make_pages", never)
    monkeypatch.setattr("jaxinfer.build.read_budget", lambda share: MemoryBudget(2**20, 0, None))
    with pytest.raises(ConfigError, match="bytes are planned, but there are 1048576"):
        build(small)


def test_it_is_not_ready_before_the_last_program_is(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    built, load, may_load = Event(), ProgramCache.load, Event()

    def wait_for_one(cache: ProgramCache, name: str) -> Any:
        if name == "sample rows=8 plain":
            assert may_load.wait(60)
        return load(cache, name)

    monkeypatch.setattr(ProgramCache, "load", wait_for_one)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(build, small)
        future.add_done_callback(lambda _: built.set())
        assert not built.wait(1)
        may_load.set()
        names = future.result(60).runner._programs.by_name.keys()
    assert len(names) == NUM_SMALL - 1  # the pool's is called once


def test_a_program_that_cannot_be_made_ends_the_build(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    listed = ProgramList.serving

    def one_more(self: ProgramList) -> list[Program]:
        def broken() -> Any:
            raise TypeError("no such shape")

        return [*listed(self), Program("broken rows=8 step", broken)]

    monkeypatch.setattr(ProgramList, "serving", one_more)
    with pytest.raises(TypeError, match="no such shape"):
        build(small)


def test_compiling_ahead_is_all_that_a_later_build_needs(
    small: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In another process, with flags that say the same, and without a port: the host is nobody."""
    own = replace(small, cache_dir=str(tmp_path / "cache"), max_model_len=320)
    flags = {
        "--cache-dir": own.cache_dir,
        "--page-size": own.cache.page_size,
        "--kv-cache-memory": own.cache.kv_cache_bytes,
        "--max-num-seqs": own.scheduler.max_num_seqs,
        "--max-num-batched-tokens": own.scheduler.max_num_batched_tokens,
        "--max-model-len": 320,
        "--host": "192.0.2.1",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    done = subprocess.run(
        [sys.executable, "serve.py", own.source.model, "--compile-only", *words],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "cache" / "programs").iterdir()
    assert len(list(folder.iterdir())) == NUM_SMALL
    assert f"programs: 0 loaded, {NUM_SMALL} compiled" in done.stderr
    assert f"folder: {folder} (1." in done.stderr
    assert "listening" not in done.stderr
    llm = LLM(config=own)
    assert llm._built.summary["programs"] == f"{NUM_SMALL} loaded, 0 compiled"
    assert llm.compile_events() == {"startup": 0, "serving": 0, "version": 0}


def test_compiling_ahead_reads_no_weights_and_allocates_no_pool(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights or pages")

    monkeypatch.setattr("jaxinfer.build.load_weights", never)
    monkeypatch.setattr(program_set, "make_pages", never)
    phases: list[str] = []
    told = compile_ahead(small, phases.append)
    assert phases == list(told["seconds"]) == ["find model", "compile"]
    assert told.keys() == {"weights", "programs", "folder", "seconds"}


def test_compiling_ahead_fails_if_nothing_could_be_kept(
    small: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("jaxinfer.runtime.program_cache.ProgramCache._write", full)
    with pytest.raises(ConfigError, match="10 of 10 programs could not be kept in "):
        compile_ahead(replace(small, cache_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 641}, "max_model_len must be at most the model's 640; got 641"),
        ({"kv_cache_bytes": 10}, "the KV pool has room for 0 tokens"),
        ({"max_model_len": 640, "kv_cache_bytes": 1 << 16}, "one sequence may have 640"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_compiles(
    tmp_path: Path, fields: dict[str, Any], message: str, counter: CompileCounter
):
    model = write_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        build(tiny_engine_config(model, tmp_path / "cache", **fields))
    assert counter.count == 0


def test_gpu_kernels_are_refused_where_there_is_no_gpu(small: EngineConfig):
    with pytest.raises(ConfigError, match="kernel backend pallas needs an NVIDIA GPU"):
        build(replace(small, kernel_backend="pallas"))


class FakeGpu:
    platform = "gpu"

    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability


@pytest.mark.parametrize(
    ("capability", "fields", "expected"),
    [
        ("9.0", {}, Backend("pallas", "sm_90")),
        ("8.6", {"batch_invariant": False}, Backend("pallas", "sm_80", is_exact=False)),
        ("8.0", {"kernel_backend": "reference"}, Backend("reference", "sm_80")),
        ("7.5", {}, Backend("reference", "sm_90")),
    ],
)
def test_kernels_follow_the_device_and_the_flags(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: str,
    fields: dict[str, Any],
    expected: Backend,
):
    monkeypatch.setattr(jax, "devices", lambda: [FakeGpu(capability)])
    assert build_module.backend_of(replace(EngineConfig(), **fields)) == expected
    assert ("may depend on its company" in caplog.text) == (expected.form == "reference")


def test_a_gpu_that_cannot_be_exact_is_refused_with_the_flag(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda: [FakeGpu("10.0")])
    with pytest.raises(ConfigError, match="--no-batch-invariant"):
        build_module.backend_of(EngineConfig())


def test_a_path_without_a_model_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises((CheckpointError, ConfigError), match="expected"):
        build(tiny_engine_config(tmp_path / "empty", tmp_path / "cache"))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    model = write_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"intermediate_size": 96}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has shape \(48, 80\), the model needs \(48, 96\)"):
        build(tiny_engine_config(model, tmp_path / "cache", **SMALL))


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_gguf_and_safetensors_of_one_model_say_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, family: str, tied: bool
):
    """q and k rows are permuted in a llama's GGUF and in no other's."""
    model = make_model(family, tied=tied)
    paths = (
        write_folder(tmp_path / "hf", model),
        write_gguf(tmp_path / "m.gguf", model, as_vocabulary(train_byte_level(), "gpt-2")),
    )
    answers: list[Any] = []
    for path in paths:
        config = tiny_engine_config(path, shared_cache(tmp_path_factory), **SMALL)
        generations = LLM(config=config).generate(PROMPTS, logprobs=0, **GREEDY)
        answers.append([(g.token_ids, g.choices[0].logprobs, g.text) for g in generations])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "got MambaForCausalLM"),
        ({"architectures": 5}, "model: "),
        ({"sliding_window": 128}, "sliding_window must be absent or off; got 128"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number; got 'small'"),
        ({"rope_scaling": "x"}, "must be one flat object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "positive factor"),
    ],
)
def test_a_fault_of_the_checkpoint_names_its_folder(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    model = write_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as info:
        build(tiny_engine_config(model, tmp_path / "cache"))
    assert str(info.value).startswith(str(model))
