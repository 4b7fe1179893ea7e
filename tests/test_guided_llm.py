"""Guided answers of real programs: on a tiny random model, and (slow) on SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import EngineConfig, SamplingParams, replace
from jaxinfer.errors import InvalidRequest
from jaxinfer.offline import LLM
from jaxinfer.scheduling.request import FinishReason
from tests.tiny_llm import pages_used, tiny_llm

PROMPTS = ["the cat sat on", "a dog and the log", "abc abc"]
RULE: dict[str, Any] = {"regex": "(the|cat|dog){2,4}[0-9]{3}"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert pages_used(llm) == 0
        assert llm.compile_events()["serving"] == 0


def digits_and_words(text: str) -> bool:
    words, digits = text[:-3], text[-3:]
    for word in ("the", "cat", "dog"):
        words = words.replace(word, "")
    return not words and digits.isdigit()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_follows_its_rule_and_ends_with_it(llm: LLM, temperature: float):
    sampling = SamplingParams(
        guided=RULE, temperature=temperature, seed=1, max_tokens=40, n=3, logprobs=3
    )
    for generation in llm.generate(PROMPTS, sampling):
        for choice in generation.choices:
            assert digits_and_words(choice.text), choice.text
            assert choice.finish_reason is FinishReason.STOP
            assert len(choice.logprobs) == len(choice.token_ids)


def test_an_unguided_neighbour_keeps_its_bits(llm: LLM):
    free = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, logprobs=5)
    (alone,) = llm.generate(PROMPTS[0], free)
    guided = SamplingParams(guided=RULE, temperature=1.0, seed=3, max_tokens=40)
    beside = llm.generate([PROMPTS[0], *PROMPTS], [free, guided, guided, guided])[0]
    assert beside.token_ids == alone.token_ids
    assert beside.choices[0].logprobs == alone.choices[0].logprobs


def test_a_guided_answer_is_the_same_alone_and_in_company(llm: LLM):
    guided = SamplingParams(guided=RULE, temperature=1.0, seed=3, max_tokens=40, logprobs=2)
    together = llm.generate(PROMPTS, guided)
    for prompt, one in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate(prompt, guided)
        assert alone.token_ids == one.token_ids
        assert alone.choices[0].logprobs == one.choices[0].logprobs


def test_a_bad_rule_is_refused_before_anything_runs(llm: LLM):
    with pytest.raises(InvalidRequest, match="guided: not a usable regex"):
        llm.generate(PROMPTS, guided={"regex": "("})
    with pytest.raises(InvalidRequest, match="guided must be exactly one of"):
        llm.generate(PROMPTS, guided={"regex": "a", "choice": ["a"]})


REQUIRED = ["name", "age", "tags"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": REQUIRED,
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smollm2(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = replace(
        EngineConfig(),
        model=str(default_model),
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        max_num_seqs=8,
        kv_cache_bytes=2**29,
        show_progress=False,
    )
    return LLM(config=config)


@pytest.mark.slow
def test_smollm2_writes_json_of_a_schema_in_two_choices_and_in_a_stream(smollm2: LLM):
    messages = [{"role": "user", "content": "Describe Anna, a 31 year old baker, in JSON."}]
    rule = {"json_schema": PERSON}
    sampling = SamplingParams(guided=rule, n=2, temperature=0.8, seed=5, max_tokens=200)
    choices = smollm2.chat(messages, sampling).choices
    for choice in choices:
        assert choice.finish_reason is FinishReason.STOP, choice.text
        person = json.loads(choice.text)
        assert list(person) == REQUIRED
        assert 0 <= person["age"] <= 120
        assert len(person["name"]) <= 30
        assert len(person["tags"]) <= 3
    prompt = smollm2.tokenizer.encode_chat(messages)
    single = SamplingParams(guided=rule, temperature=0, max_tokens=200)
    pieces = [output.text for output in smollm2.stream(prompt, single)]
    assert len(pieces) > 10
    assert json.loads("".join(pieces)).keys() == set(REQUIRED)
    assert smollm2.compile_events()["serving"] == 0
