"""The main job on the default model: the reference's tokens, and exactness.

The reference is transformers in float32, recorded in tests/data/smollm2_greedy.json by
tests/oracle/make_golden.py. Builds the model once, with the smallest row bucket.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, replace
from jaxinfer.offline import LLM
from tests.exactness import Bench

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
PROMPTS = {prompt["name"]: prompt for prompt in GOLDEN["prompts"]}
NEAR_TIE = 1e-3  # of two logits: either is a right answer
LOGPROB_ERROR = 1e-3  # between two float32 computations in different orders


@pytest.fixture(scope="module")
def llm(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = replace(
        EngineConfig(),
        model=str(default_model),
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        max_num_seqs=8,
        kv_cache_bytes=2**29,
        show_progress=False,
    )
    return LLM(config=config)


@pytest.fixture(scope="module")
def bench(llm: LLM) -> Bench:
    return Bench(llm._built)


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


EXACT = ("capital", "german", "spanish", "japanese", "chat-turns", "story")


@pytest.mark.parametrize("name", EXACT)
def test_company_chunks_and_prefix_hits_change_no_bit(bench: Bench, name: str) -> None:
    """Tokens and logprobs alone, among 7 random neighbours, in chunks of 32 and 512, on a hit."""
    prompt = PROMPTS[name]["prompt_ids"]
    request = bench.request(prompt, max_tokens=16, temperature=0.0)
    want = bench.alone(request)
    assert bench.alone(request, chunk=32).bits == want.bits
    engine = bench.engine()
    rng = np.random.default_rng(len(prompt))
    mine = bench.again(request)
    traces = bench.run(engine, bench.neighbours(rng, 3, 200), [mine], bench.neighbours(rng, 4, 100))
    assert traces[mine.request_id].bits == want.bits
    hit = bench.again(request)
    trace = bench.run(engine, [hit])[hit.request_id]
    assert trace.stats is not None
    assert trace.stats.num_cached_tokens == (len(prompt) - 1) // bench.page_size * bench.page_size
    assert trace.bits == want.bits


def test_preemption_changes_no_bit(bench: Bench) -> None:
    prompts = [PROMPTS[name]["prompt_ids"] for name in ("spanish", "japanese")]
    requests = [
        bench.request(prompts[0], max_tokens=100, temperature=0.0),
        bench.request(prompts[1], max_tokens=100, temperature=0.9, seed=1),
    ]
    traces = bench.run(bench.engine(num_pages=6), requests)
    stats = [trace.stats for trace in traces.values() if trace.stats]
    assert sum(s.num_preemptions for s in stats) >= 1
    for request in requests:
        assert traces[request.request_id].bits == bench.alone(request).bits
