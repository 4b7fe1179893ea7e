"""The KV pages of a real model go in the middle of a run, and nobody can tell from the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.errors import PoolLost
from jaxinfer.offline import LLM
from jaxinfer.runtime.runner import ModelRunner
from tests.tiny_llm import pages_used, tiny_llm

PROMPTS = [[5, 6, 7], [9] * 20, list(range(40)), [*list(range(38)), 1, 2]]
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "n": 2, "frequency_penalty": 0.5, "logprobs": 0},
)
Loss = Callable[[ModelRunner], None]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory)


def answers(llm: LLM) -> list[Any]:
    """Tokens, and the bits of their log-probabilities."""
    return [
        (choice.token_ids, np.array([e.logprob for e in choice.logprobs], np.float32).tobytes())
        for fields in FIELDS
        for generation in llm.generate(PROMPTS, max_tokens=12, ignore_eos=True, **fields)
        for choice in generation.choices
    ]


def delete_all(runner: ModelRunner) -> None:
    for array in _arrays(runner):
        array.delete()


def delete_one(runner: ModelRunner) -> None:
    runner._pages[-1][1].delete()


def forget_the_newest_tokens(runner: ModelRunner) -> None:
    runner._newest.delete()


def fill_with_nan(runner: ModelRunner) -> None:
    runner._pages = jax.tree.map(lambda k: jax.device_put(np.full_like(k, np.nan)), runner._pages)
    raise PoolLost("the pages hold anything")


def fail_at_host(runner: ModelRunner) -> None:
    raise RuntimeError("a step that leaves the pages alone")


def _arrays(runner: ModelRunner) -> Iterator[Any]:
    return iter(jax.tree.leaves(runner._pages))


@pytest.mark.parametrize("at", [0, 2, 9])
@pytest.mark.parametrize(
    "lose", [delete_all, delete_one, forget_the_newest_tokens, fill_with_nan, fail_at_host]
)
def test_answers_keep_their_bits_when_the_pages_go(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, lose: Loss, at: int
):
    undisturbed = answers(llm)
    runner, dispatch = llm._built.runner, llm._built.runner.dispatch
    num_steps = 0

    def losing(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (at + 1, at + 12):
            lose(runner)
        return dispatch(batch)

    num_rebuilds, rebuild = 0, runner.rebuild

    def counted() -> None:
        nonlocal num_rebuilds
        num_rebuilds += 1
        lost = list(_arrays(runner))
        rebuild()
        assert all(array.is_deleted() for array in lost)

    monkeypatch.setattr(runner, "dispatch", losing)
    monkeypatch.setattr(runner, "rebuild", counted)
    assert answers(llm) == undisturbed
    assert num_rebuilds == (0 if lose is fail_at_host else 2)
    assert pages_used(llm) == 0
    assert llm.compile_events()["serving"] == 0


def test_scoring_takes_its_pages_from_the_pool_of_now(llm: LLM):
    before = llm.score([list(range(30))])
    delete_all(llm._built.runner)
    llm.generate([[1, 2]], max_tokens=2)
    assert llm.score([list(range(30))]) == before
    assert pages_used(llm) == 0
