"""An engine whose every operation is the GPU kernel's source, interpreted on the CPU, gives the
reference's tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.offline import LLM, Generation
from tests.tiny_llm import SMALL, tiny_llm

PROMPTS = ["a", "The capital of France is", "x" * 60, "one two three four five six"]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config.json, engine's fields
    "layered steps": ({}, {}),
    "fused steps": ({}, {"step_programs": "fused"}),
    "one kv head, biases, untied head": (
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {},
    ),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3, logprobs=0)


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LLM, LLM]:
    """The interpreted engine and the reference's."""
    changes, fields = MODELS[request.param]
    return tuple(  # type: ignore[return-value]
        tiny_llm(tmp_path_factory, SMALL | fields | {"kernel_backend": form}, **changes)
        for form in ("interpret", "reference")
    )


def logprobs(generation: Generation) -> list[float]:
    return [token.logprob for token in generation.choices[0].logprobs]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_those_of_the_reference(pair: tuple[LLM, LLM], params: SamplingParams):
    got, want = (llm.generate(PROMPTS, params) for llm in pair)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=1e-4)


def test_company_changes_no_bit(pair: tuple[LLM, LLM]):
    """Alone, then in a batch, where prompts are prefilled in other chunks."""
    interpreted, _ = pair
    together = interpreted.generate(PROMPTS, DRAWN)
    for prompt, among in zip(PROMPTS, together, strict=True):
        alone = interpreted.generate([prompt], DRAWN)[0]
        assert alone.token_ids == among.token_ids
        assert logprobs(alone) == logprobs(among)
