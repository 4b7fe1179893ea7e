"""The answers are those that the plain form of the model gives, one prompt at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.quantization.forward import Forward
from jaxinfer.quantization.greedy import MAX_PROMPT_TOKENS, greedy, num_steps
from jaxinfer.quantization.subject import Subject, open_subject, tokenizer_of
from tests.tiny import write_checkpoint

PROMPTS = [[5, 9, 200], [17], [300, 301, 302, 303, 304, 305, 306]]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("model")))
    return open_subject(checkpoint, "tiny", tokenizer=tokenizer_of(checkpoint))


@pytest.fixture(scope="module")
def free(subject: Subject) -> list[list[int]]:
    """Five tokens of each."""
    return answers(subject, PROMPTS, 5)


def answers(subject: Subject, prompts: list[list[int]], num: int, **more: Any) -> list[list[int]]:
    more.setdefault("end_ids", frozenset[int]())
    return greedy(subject.decoder, subject.params, prompts, num, **more)


def test_each_row_is_what_the_model_says_alone(subject: Subject, free: list[list[int]]):
    forward = Forward(subject.decoder)
    for prompt, answer in zip(PROMPTS, free, strict=True):
        text = [*prompt, *answer]
        padded = jnp.asarray(text + [0] * (16 - len(text)), jnp.int32)
        likeliest = jnp.argmax(forward.logits(subject.params, padded), axis=-1)
        assert likeliest[len(prompt) - 1 : len(text) - 1].tolist() == answer


def test_an_end_token_ends_its_row_and_is_left_out(subject: Subject, free: list[list[int]]):
    end = free[1][2]
    expected = [row[: row.index(end)] if end in row else row for row in free]
    assert expected != free
    told: list[int] = []
    found = answers(subject, PROMPTS, 5, end_ids=frozenset({end}), on_step=lambda: told.append(1))
    assert found == expected
    assert len(told) <= num_steps(PROMPTS, 5) == 11


def test_nothing_is_computed_when_all_have_ended(subject: Subject):
    told: list[int] = []
    anything = frozenset(range(subject.decoder.config.vocab_size))
    found = answers(subject, PROMPTS, 3, end_ids=anything, on_step=lambda: told.append(1))
    assert found == [[], [], []]
    assert len(told) == max(map(len, PROMPTS))


def test_what_a_pool_would_round_is_rounded(subject: Subject, free: list[list[int]]):
    assert answers(subject, PROMPTS, 5, round_kv=lambda x: jnp.round(x / 4) * 4) != free


def test_nan_is_a_failure(subject: Subject):
    broken = jax.tree.map(lambda x: x * jnp.nan, subject.params)
    with pytest.raises(EngineFailure, match="NaN"):
        greedy(subject.decoder, broken, PROMPTS, 2, end_ids=frozenset())


@pytest.mark.parametrize("prompt", [[], [1] * (MAX_PROMPT_TOKENS + 1)])
def test_a_prompt_of_no_or_too_many_tokens_is_refused_by_its_number(
    subject: Subject, prompt: list[int]
):
    with pytest.raises(InvalidRequest, match=f"prompt 2 has {len(prompt)} tokens"):
        answers(subject, [[1], prompt], 2)


def test_rows_of_logits_are_those_of_the_whole_window(subject: Subject):
    ids = np.arange(100, 180, dtype=np.int32)
    rows = list(subject.logit_rows(ids))
    assert [len(part) for part in rows] == [64, 16]
    expected = Forward(subject.decoder).logits(subject.params, jnp.asarray(ids))
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=2e-4, atol=2e-4)
