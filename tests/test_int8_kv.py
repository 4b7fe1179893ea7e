"""A whole engine on an int8 pool, with weights rounded to int8 while they are loaded: the same
promises as on floats.

tests/test_exactness.py has every format of weights; it is slow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from bench.exactness.circumstance import Lab
from bench.exactness.probes import random_probes
from bench.exactness.restart import in_this_process
from bench.exactness.subject import Subject
from bench.exactness.suite import cases, circumstances
from jaxinfer.build import build
from jaxinfer.config import EngineConfig, SamplingParams, replace
from jaxinfer.offline import LLM
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL, pages_used

PROMPTS = [[5, 6, 7], [9] * 20, list(range(40)), [*list(range(38)), 1, 2]]
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=3, logprobs=0, ignore_eos=True)
TOKEN_BYTES = 2 * 2 * 2 * (16 + 4)  # keys and values, 2 layers, 2 heads of 16 with a scale
VOCAB_SIZE = 250
MANY = (1, 2, 16, 17, 31, 100, 129, 200)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model, cache = write_checkpoint(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("c")
    pool = {"kv_cache_dtype": "int8", "kv_cache_bytes": 160 * 16 * TOKEN_BYTES}
    return tiny_engine_config(model, cache, **SMALL, **pool, quantization="int8")


@pytest.fixture(scope="module")
def llm(config: EngineConfig) -> LLM:
    return LLM(config=config)


def answers(llm: LLM) -> list[tuple[Any, list[float]]]:
    """Tokens, and their log-probabilities."""
    choices = (generation.choices[0] for generation in llm.generate(PROMPTS, DRAWN))
    return [(c.token_ids, [entry.logprob for entry in c.logprobs]) for c in choices]


def test_the_pool_is_planned_in_int8_and_says_so(llm: LLM):
    plan = llm._built.plan
    assert plan.page_bytes == 16 * TOKEN_BYTES
    assert f"({plan.num_pages} pages of 16 tokens, int8)" in llm._built.summary["memory"]


@pytest.mark.parametrize("which", [0, 3])
def test_a_lost_pool_is_made_anew_scales_included(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, which: int
):
    undisturbed = answers(llm)
    runner, dispatch = llm._built.runner, llm._built.runner.dispatch
    num_steps = 0

    def losing(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            jax.tree.leaves(runner._pages[-1])[which].delete()
        return dispatch(batch)

    monkeypatch.setattr(runner, "dispatch", losing)
    assert answers(llm) == undisturbed
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(runner._pages))
    assert pages_used(llm) == 0


def test_the_weights_are_integers(llm: LLM):
    layer = llm._built.runner._params[llm.version]["layers"][0]
    assert layer["mlp"]["up_proj"]["q"].dtype == np.int8


def test_a_text_scores_as_it_was_generated(llm: LLM):
    prompt = PROMPTS[1]
    choice = llm.generate([prompt], max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)[0]
    scores = llm.score([[*prompt, *choice.token_ids]])[0][len(prompt) - 1 :]
    drawn = [entry.logprob for entry in choice.choices[0].logprobs]
    np.testing.assert_allclose(scores, drawn, atol=1e-5)
    assert pages_used(llm) == 0


@pytest.mark.parametrize(
    ("backend", "lengths"),
    [
        ("reference", (17, 40)),
        pytest.param("reference", MANY, marks=pytest.mark.slow),
        pytest.param("interpret", MANY, marks=pytest.mark.slow),
    ],
)
def test_no_circumstance_of_the_harness_changes_a_bit(
    config: EngineConfig, backend: str, lengths: tuple[int, ...]
):
    rebuild = partial(build, replace(config, kernel_backend=backend))
    probes = random_probes(lengths, VOCAB_SIZE, seed=0)
    subject = Subject(rebuild(), restart=in_this_process(rebuild))
    lab = Lab(subject, probes)
    found = [lab.check(c, p) for c, p in cases(circumstances(subject.limits, probes), probes)]
    assert len(found) > 20
    assert [str(case) for case in found if case.wrong is not None] == []
