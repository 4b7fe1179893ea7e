"""Grammar masks on the device: what is not admitted is never chosen, all else keeps its bits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.runtime.sampling import Sampled
from tests.runtime.test_penalties import (
    BUCKETS,
    NEWEST,
    VOCAB,
    adjusted,
    draws,
    penalties_of,
    random_case,
    run,
    run_full,
    step,
    take,
)

WORDS = -(-VOCAB // 32)


def mask_of(*token_ids: int) -> np.ndarray:
    mask = np.zeros(WORDS, np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)


def masked_case(num_rows: int, seed: int) -> tuple[np.ndarray, Any, dict[int, set[int]]]:
    """Every other row of a random case admits about 20 random tokens."""
    logits, penalties = random_case(num_rows, seed)
    rng = np.random.default_rng(seed)
    admitted = {row: set(rng.integers(0, VOCAB, 20).tolist()) for row in range(0, num_rows, 2)}
    for row, token_ids in admitted.items():
        penalties.mask[row] = mask_of(*token_ids)
    return logits, penalties, admitted


@pytest.mark.parametrize("token_id", [0, 1, 31, 32, 63, 64, 415, VOCAB - 1])
def test_each_bit_is_its_token(token_id: int):
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    penalties = penalties_of(8)
    penalties.mask[3] = mask_of(token_id)
    got = adjusted(logits, penalties)
    assert got[3, token_id] == logits[3, token_id]
    assert (np.delete(got[3], token_id) == -np.inf).all()
    others = np.arange(8) != 3
    assert got[others].tobytes() == logits[others].tobytes()


@pytest.mark.parametrize("num_rows", BUCKETS)
@pytest.mark.parametrize("temperature", [0.0, 0.9, 2.0])
def test_only_what_is_admitted_is_chosen(num_rows: int, temperature: float):
    logits, penalties, admitted = masked_case(num_rows, seed=num_rows)
    arrays: dict[str, Any] = {"temperature": np.full(num_rows, temperature)}
    for top_k in (0, 1, 400):
        sampled, _ = run(logits, penalties, top_k=np.full(num_rows, top_k), **arrays)
        for row, token_ids in admitted.items():
            assert int(sampled.token_ids[row]) in token_ids


@pytest.mark.parametrize("num_rows", BUCKETS)
def test_a_row_without_a_grammar_keeps_its_bits_beside_rows_with_one(num_rows: int):
    logits, penalties, admitted = masked_case(num_rows, seed=20)
    temperatures = np.resize([0.0, 0.7, 0.7], num_rows)
    got, by = run(logits, penalties, temperature=temperatures)
    free = np.array([row not in admitted for row in range(num_rows)])
    penalties.mask[:] = -1
    want, want_by = run(logits, penalties, temperature=temperatures)
    assert by[free].tobytes() == want_by[free].tobytes()
    assert by[~free].tobytes() != want_by[~free].tobytes()
    for name in Sampled._fields:
        assert getattr(got, name)[free].tobytes() == getattr(want, name)[free].tobytes(), name


def test_a_row_that_asks_for_nothing_has_the_bits_of_the_full_variant_beside_masked_ones():
    logits, _ = random_case(64, seed=21)
    penalties = penalties_of(64)
    penalties.mask[::2] = mask_of(5, 6, 7)
    temperatures = np.resize([0.0, 0.0, 0.9, 0.9], 64)
    got, by = run(logits, penalties, temperature=temperatures)
    want = run_full(logits, temperature=temperatures)
    assert by[1::2].tobytes() == logits[1::2].tobytes()
    for name in Sampled._fields:
        assert getattr(got, name)[1::2].tobytes() == getattr(want, name)[1::2].tobytes(), name


def test_a_masked_row_has_the_same_bits_at_any_place_of_any_bucket():
    logits, penalties, _ = masked_case(64, seed=22)
    arrays = draws(64, temperature=[0, 1, 0.7, 2] * 16, top_k=[0, 9, 0, 40] * 16)
    sampled, want = jax.tree.map(np.asarray, step(logits, arrays, penalties, NEWEST))
    rng = np.random.default_rng(23)
    for num_rows in BUCKETS:
        rows = rng.permutation(64)[:num_rows]
        mine = logits[rows], take(arrays, rows), take(penalties, rows), NEWEST
        part, got = jax.tree.map(np.asarray, step(*mine))
        assert got.tobytes() == want[rows].tobytes()
        for name in Sampled._fields:
            assert getattr(part, name).tobytes() == getattr(sampled, name)[rows].tobytes(), name


def test_logprobs_stay_those_of_the_models_own_distribution():
    logits, penalties, _ = masked_case(64, seed=24)
    got, _ = run(logits, penalties)
    raw = run_full(logits)
    assert got.top_ids.tobytes() == raw.top_ids.tobytes()
    assert got.top_logprobs.tobytes() == raw.top_logprobs.tobytes()
    wide = logits.astype(np.float64)
    wide -= np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) + wide.max(
        1, keepdims=True
    )
    want = np.take_along_axis(wide, got.token_ids[:, None].astype(np.int64), 1)[:, 0]
    np.testing.assert_allclose(got.logprobs, want, rtol=1e-5, atol=1e-4)


def test_the_only_admitted_token_is_drawn_however_unlikely():
    logits = np.zeros((8, VOCAB), np.float32)
    logits[:, 9] = -200.0
    penalties = penalties_of(8)
    penalties.mask[:] = mask_of(9)
    sampled, _ = run(logits, penalties, temperature=np.full(8, 0.1), top_k=np.full(8, 1))
    assert set(sampled.token_ids.tolist()) == {9}


def test_logits_that_are_no_numbers_still_show_where_they_are_masked():
    logits, penalties, admitted = masked_case(8, seed=25)
    outside = next(i for i in range(VOCAB) if i not in admitted[2])
    logits[2, outside] = np.nan
    sampled, _ = run(logits, penalties)
    assert np.isnan(sampled.logprobs[2])
    assert not np.isnan(np.delete(sampled.logprobs, 2)).any()
