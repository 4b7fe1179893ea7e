"""Gemma 3 270M by its catalog name: the reference's tokens, from its text to its answer.

The reference is transformers in float32 and SentencePiece, recorded in tests/data/gemma3.json by
tests/oracle/make_gemma3_golden.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, replace
from jaxinfer.offline import LLM

pytestmark = pytest.mark.slow

NAME = "gemma-3-270m"
MODELS = Path(".cache") / "jaxinfer" / "models"  # below the home folder
GOLDEN = json.loads((Path(__file__).parent / "data" / "gemma3.json").read_text("utf-8"))
NEAR_TIE = 1e-3  # of two logits: either is a right answer
LOGPROB_ERROR = 1e-3  # between two float32 computations in different orders
NUM_NEW, END_OF_TURN, EOS = 32, 106, 1


@pytest.fixture(scope="module")
def llm(users_home: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = users_home / MODELS / NAME / GOLDEN["about"]["model"]
    if not path.is_file():
        pytest.skip(f"needs {NAME} in ~/{MODELS}; python serve.py --model {NAME} fetches it")
    config = replace(
        EngineConfig(),
        model=str(path),
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        max_num_seqs=8,
        max_model_len=2048,
        kv_cache_bytes=2**28,
        show_progress=False,
    )
    return LLM(config=config)


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[Any]:
    """All prompts at once: chunks, riding rows and full decode batches."""
    prompts = [prompt["prompt_ids"] for prompt in GOLDEN["prompts"]]
    return llm.generate(prompts, max_tokens=NUM_NEW, temperature=0, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("number", range(len(GOLDEN["prompts"])))
def test_greedy_tokens_are_the_references(number: int, answers: list[Any]):
    want, got = GOLDEN["prompts"][number], answers[number]
    tokens = np.array(got.token_ids)
    assert len(tokens) == NUM_NEW
    differing = np.flatnonzero(tokens != np.array(want["output_ids"]))
    num_equal = differing[0] if len(differing) else NUM_NEW
    if num_equal < NUM_NEW:
        assert want["margins"][num_equal] < NEAR_TIE
        assert tokens[num_equal] == want["second_ids"][num_equal]
    logprobs = [entry.logprob for entry in got.choices[0].logprobs[:num_equal]]
    np.testing.assert_allclose(logprobs, want["logprobs"][:num_equal], atol=LOGPROB_ERROR)


def test_one_prompt_is_longer_than_a_window():
    assert max(len(prompt["prompt_ids"]) for prompt in GOLDEN["prompts"]) > 512 + 128


def test_texts_have_sentencepieces_token_ids(llm: LLM):
    for entry in GOLDEN["tokenizer"]:
        ids = llm.tokenizer.encode(entry["text"], add_special_tokens=False)
        assert ids == entry["token_ids"], entry["text"]
    for prompt in GOLDEN["prompts"]:
        assert llm.tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]


def test_a_turn_ends_with_either_token(llm: LLM):
    assert set(llm.tokenizer.eos_token_ids) == {EOS, END_OF_TURN}
