"""The answers are those that the plain form of the model gives, one prompt at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.quantization.greedy import MAX_PROMPT_TOKENS, Rows, greedy, num_steps
from jaxinfer.quantization.subject import Subject, open_subject, tokenizer_of
from tests.tiny import write_checkpoint

PROMPTS = [[5, 9, 200], [17], [300, 301, 302, 303, 304, 305, 306]]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    model = write_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    checkpoint = open_checkpoint(model)
    return open_subject(checkpoint, "tiny", tokenizer=tokenizer_of(checkpoint))


def rows_of(subject: Subject, **changes: Any) -> Rows:
    fields: dict[str, Any] = {
        "params": subject.params,
        "num_rows": 3,
        "num_positions": 12,
    } | changes
    return Rows(subject.decoder, **fields)


@pytest.fixture(scope="module")
def rows(subject: Subject) -> Rows:
    return rows_of(subject)


@pytest.fixture(scope="module")
def free(rows: Rows) -> list[list[int]]:
    """Five tokens of each."""
    return answers(rows, PROMPTS, 5)


def answers(rows: Rows, prompts: list[list[int]], num: int, **more: Any) -> list[list[int]]:
    more.setdefault("end_ids", frozenset[int]())
    return greedy(rows, prompts, num, **more)


def test_each_row_is_what_the_model_says_alone(subject: Subject, free: list[list[int]]):
    """Rows one token at a time against `Subject.logit_rows`, whole windows."""
    for prompt, answer in zip(PROMPTS, free, strict=True):
        text = [*prompt, *answer]
        padded = np.asarray(text + [0] * (80 - len(text)), np.int32)
        parts = list(subject.logit_rows(padded))
        assert [len(part) for part in parts] == [64, 16]
        likeliest = np.concatenate(parts).argmax(axis=-1)
        assert likeliest[len(prompt) - 1 : len(text) - 1].tolist() == answer


def test_an_end_token_ends_its_row_and_is_left_out(rows: Rows, free: list[list[int]]):
    end = free[1][2]
    expected = [row[: row.index(end)] if end in row else row for row in free]
    assert expected != free
    told: list[int] = []
    found = answers(rows, PROMPTS, 5, end_ids=frozenset({end}), on_step=lambda: told.append(1))
    assert found == expected
    assert len(told) <= num_steps(PROMPTS, 5) == 11


def test_nothing_is_computed_when_all_have_ended(subject: Subject, rows: Rows):
    told: list[int] = []
    anything = frozenset(range(subject.decoder.config.vocab_size))
    found = answers(rows, PROMPTS, 3, end_ids=anything, on_step=lambda: told.append(1))
    assert found == [[], [], []]
    assert len(told) == max(map(len, PROMPTS))


def test_what_a_pool_would_round_is_rounded(subject: Subject, free: list[list[int]]):
    coarse = rows_of(subject, round_kv=lambda x: jnp.round(x / 4) * 4)
    assert answers(coarse, PROMPTS, 5) != free


def test_nan_is_a_failure(subject: Subject):
    broken = jax.tree.map(lambda x: x * jnp.nan, subject.params)
    with pytest.raises(EngineFailure, match="NaN"):
        answers(rows_of(subject, params=broken), PROMPTS, 2)


@pytest.mark.parametrize("prompt", [[], [1] * (MAX_PROMPT_TOKENS + 1)])
def test_a_prompt_of_no_or_too_many_tokens_is_refused_by_its_number(rows: Rows, prompt: list[int]):
    with pytest.raises(InvalidRequest, match=f"prompt 2 has {len(prompt)} tokens"):
        answers(rows, [[1], prompt], 2)
