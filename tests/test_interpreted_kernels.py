"""An engine whose every operation is the GPU kernel's source, interpreted on the CPU, gives the
reference's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.offline import LLM, Generation
from pallas_kernels import attention_segments
from tests.models.tiny_decoder import QWEN3_MOE
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL

PROMPTS = ["a", "The capital of France is", "x" * 60, "one two three four five six " * 12]
LOG_SEGMENT = 6  # so that the long prompt's KV is shared out among programs
MODEL: dict[str, Any] = {
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3, logprobs=0)


def engine(
    factory: pytest.TempPathFactory,
    form: Literal["interpret", "reference"],
    dtype: str = "float32",
    **changes: Any,
) -> LLM:
    """Its steps are one program, as on a GPU."""
    model, cache = (factory.mktemp(name) for name in ("model", "cache"))
    write_checkpoint(model, **MODEL | changes)
    fields = SMALL | {"step_programs": "fused", "kernel_backend": form, "dtype": dtype}
    return LLM(config=tiny_engine_config(model, cache, **fields))


@pytest.fixture(scope="module", autouse=True)
def short_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_segments, "LOG_SEGMENT", LOG_SEGMENT)
        patch.setattr(attention_segments, "SEGMENT", 1 << LOG_SEGMENT)
        yield


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return engine(tmp_path_factory, "interpret")


def logprobs(generation: Generation) -> list[float]:
    return [token.logprob for token in generation.choices[0].logprobs]


def same_tokens(interpreted: LLM, reference: LLM) -> None:
    for params in (GREEDY, DRAWN):
        got, want = (llm.generate(PROMPTS, params) for llm in (interpreted, reference))
        for ours, theirs in zip(got, want, strict=True):
            assert ours.token_ids == theirs.token_ids
            np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=1e-4)


def test_tokens_are_those_of_the_reference(
    interpreted: LLM, tmp_path_factory: pytest.TempPathFactory
):
    same_tokens(interpreted, engine(tmp_path_factory, "reference"))


def company_changes_no_bit(llm: LLM) -> None:
    """Alone, then in a batch, where prompts are prefilled in other chunks."""
    together = llm.generate(PROMPTS, DRAWN)
    for prompt, among in zip(PROMPTS, together, strict=True):
        alone = llm.generate([prompt], DRAWN)[0]
        assert alone.token_ids == among.token_ids
        assert logprobs(alone) == logprobs(among)


def test_company_changes_no_bit(interpreted: LLM):
    company_changes_no_bit(interpreted)


@pytest.mark.slow
def test_company_changes_no_bit_of_bfloat16_whose_tiles_are_others(
    tmp_path_factory: pytest.TempPathFactory,
):
    company_changes_no_bit(engine(tmp_path_factory, "interpret", "bfloat16"))


@pytest.mark.slow
def test_a_mixture_of_experts_does_the_same(tmp_path_factory: pytest.TempPathFactory):
    interpreted = engine(tmp_path_factory, "interpret", **QWEN3_MOE)
    same_tokens(interpreted, engine(tmp_path_factory, "reference", **QWEN3_MOE))
    company_changes_no_bit(interpreted)
