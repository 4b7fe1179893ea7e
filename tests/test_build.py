"""From a configuration to an engine: what is compiled, loaded, refused, and always the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from jaxinfer.build import build
from jaxinfer.config import EngineConfig, SamplingParams, replace
from jaxinfer.errors import ConfigError, JaxInferError
from jaxinfer.offline import LLM
from jaxinfer.runtime.aot import CompileCounter
from tests.checkpoints.conftest import (
    as_vocabulary,
    make_model,
    train_byte_level,
    write_folder,
    write_gguf,
)
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, pages_used, shared_cache, tiny_llm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [9] * 20, list(range(40))]
NUM_SMALL = 3 + 3 + 4  # begin, layer, end of a prefill and a decode step; four samplers


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


def random_sampling(rng: np.random.Generator) -> SamplingParams:
    """Every feature is on in some requests and off in others."""

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        max_tokens=int(rng.integers(1, 20)),
        temperature=float(rng.choice([0.0, 0.7, 1.0, 2.0])),
        top_k=maybe(int(rng.integers(1, 500)), 0),
        top_p=maybe(float(rng.uniform(0.1, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        seed=maybe(int(rng.integers(-(2**63), 2**63 - 1)), None),
        n=maybe(int(rng.integers(2, 5)), 1),
        stop=maybe(("a", "the"), ()),
        stop_token_ids=maybe((3, 4), ()),
        logprobs=maybe(int(rng.integers(0, 21)), None),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({int(i): 3.0 for i in rng.integers(0, 400, 300)}, ()),
        ignore_eos=bool(rng.random() < 0.5),
        skip_special_tokens=bool(rng.random() < 0.5),
        include_stop_str_in_output=bool(rng.random() < 0.5),
    )


def test_a_day_of_requests_compiles_nothing(llm: LLM, counter: CompileCounter):
    """100 requests over every feature, alone and together, ended and aborted."""
    rng = np.random.default_rng(0)
    left = 100
    while left:
        number = min(left, int(rng.choice([1, 3, 8, 9, 20])))
        prompts = [rng.integers(0, 400, int(rng.integers(1, 150))).tolist() for _ in range(number)]
        samplings = [random_sampling(rng) for _ in prompts]
        stream = llm.stream(prompts[0], samplings[0])
        next(stream)
        answers = llm.generate(prompts, samplings)
        stream.close()
        for sampling, answer in zip(samplings, answers, strict=True):
            assert len(answer.choices) == sampling.n
            assert all(choice.token_ids for choice in answer.choices)
        left -= number
    assert counter.count == 0
    assert pages_used(llm) == 0


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


def test_a_damaged_cache_is_compiled_again_and_gives_the_same_tokens(
    small: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tokens = greedy(LLM(config=small))
    assert small.cache_dir is not None
    shutil.copytree(small.cache_dir, tmp_path / "cache")
    damaged: list[Path] = []
    for folder in (tmp_path / "cache" / "programs").iterdir():
        damaged += sorted(folder.glob("sample*.bin"))[:2]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1])
    again = LLM(config=replace(small, cache_dir=str(tmp_path / "cache")))
    assert again._built.summary["programs"] == f"{NUM_SMALL - 2} loaded, 2 compiled"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert greedy(again) == tokens


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
    assert phases == ["find model", "load weights", "compile", "allocate KV pool"]
    assert list(built.summary["seconds"]) == phases
    assert built.model_name == small.source.model
    assert built.max_model_len == built.plan.max_model_len == 640
    assert built.summary["num_kv_tokens"] == 80 * 16
    assert built.summary["max_concurrency"] == 2.0
    assert "KV pool 1 MiB (80 pages of 16 tokens)" in built.summary["memory"]
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
        f"{model}: config.json: architectures must name one of LlamaForCausalLM, "
        "MistralForCausalLM, Qwen2ForCausalLM; got GPT2LMHeadModel"
    )
    assert phases == ["find model"]


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


def test_a_kernel_form_that_does_not_exist_is_refused(small: EngineConfig):
    with pytest.raises((ValueError, JaxInferError), match="kernel backend must be auto or one of"):
        build(replace(small, kernel_backend="pallas"))


def test_a_path_without_a_model_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises((CheckpointError, ConfigError), match="expected"):
        build(tiny_engine_config(tmp_path / "empty", tmp_path / "cache"))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    model = write_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"intermediate_size": 96}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has shape \(48, 80\), the model needs \(48, 96\)"):
        build(tiny_engine_config(model, tmp_path / "cache"))


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
        ({"rms_norm_eps": None}, "model: "),
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
