"""The main job on the default model: the reference's tokens, and exactness.

The reference is transformers in float32, recorded in tests/data/smollm2_greedy.json by
tests/oracle/make_golden.py. Builds the model once, with the smallest row bucket. Exactness in full
is tests/test_smollm2_exactness.py, under the slow marker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.exactness.circumstance import Lab
from bench.exactness.probes import probe
from bench.exactness.subject import Subject
from bench.exactness.suite import circumstances
from jaxinfer.config import EngineConfig, replace
from jaxinfer.offline import LLM

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
PROMPTS = {prompt["name"]: prompt for prompt in GOLDEN["prompts"]}
NEAR_TIE = 1e-3  # of two logits: either is a right answer
LOGPROB_ERROR = 1e-3  # between two float32 computations in different orders


@pytest.fixture(scope="module")
def llm(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = replace(
        EngineConfig(),
        model=str(default_model),
        quantization="none",
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        max_num_seqs=8,
        kv_cache_bytes=2**29,
        show_progress=False,
    )
    return LLM(config=config)


@pytest.fixture(scope="module")
def continuations(llm: LLM) -> dict[str, Any]:
    """All golden prompts at once: prefill chunks, riding rows and full decode batches."""
    prompts = [prompt["prompt_ids"] for prompt in PROMPTS.values()]
    answers = llm.generate(prompts, max_tokens=64, temperature=0, ignore_eos=True, logprobs=1)
    return dict(zip(PROMPTS, answers, strict=True))


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_are_the_references(name: str, continuations: dict[str, Any]) -> None:
    want, got = PROMPTS[name], continuations[name]
    tokens = np.array(got.token_ids)
    assert len(tokens) == 64
    differing = np.flatnonzero(tokens != np.array(want["output_ids"]))
    num_equal = differing[0] if len(differing) else 64
    if num_equal < 64:
        assert want["margins"][num_equal] < NEAR_TIE
        assert tokens[num_equal] == want["second_ids"][num_equal]
    logprobs = [entry.logprob for entry in got.choices[0].logprobs[:num_equal]]
    np.testing.assert_allclose(logprobs, want["logprobs"][:num_equal], atol=LOGPROB_ERROR)


def test_texts_have_the_references_token_ids(llm: LLM) -> None:
    for prompt in PROMPTS.values():
        assert llm.tokenizer.encode(prompt["text"]) == prompt["prompt_ids"], prompt["name"]


@pytest.mark.parametrize("text", GOLDEN["scored"], ids=lambda scored: scored["text"][:20])
def test_score_is_the_references(llm: LLM, text: dict[str, Any]) -> None:
    (logprobs,) = llm.score([text["token_ids"]])
    np.testing.assert_allclose(logprobs, text["logprobs"], atol=LOGPROB_ERROR)
    assert -np.mean(logprobs) == pytest.approx(text["mean_nll"], abs=1e-4)


def test_the_capital_of_france_is_paris(llm: LLM) -> None:
    answer = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
    )
    assert "Paris" in answer.text
    assert answer.choices[0].finish_reason == "stop"


@pytest.fixture(scope="module")
def lab(llm: LLM) -> Lab:
    return Lab(
        Subject(llm._built), [probe("spanish", PROMPTS["spanish"]["prompt_ids"], "drawn", 1)]
    )


@pytest.mark.parametrize(
    "name", ["7 neighbours", "chunks of 32", "a hit on 1 page", "preempted once"]
)
def test_it_changes_no_bit(lab: Lab, name: str) -> None:
    (circumstance,) = (c for c in circumstances(lab.limits, lab.probes) if c.name == name)
    case = lab.check(circumstance, *lab.probes)
    assert case.wrong is None, str(case)
