"""Penalties and logit bias on the device, against the formulas in numpy, bit by bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config import MAX_LOGIT_BIAS
from jaxinfer.runtime.penalties import PenaltyArrays, penalized
from jaxinfer.runtime.sampling import Sampled, SamplingArrays, sample

VOCAB = 420
BUCKETS = (8, 16, 32, 64)
WIDTH = 512  # of a history: four tiles
NEWEST = np.arange(64, dtype=np.int32) * 5 % VOCAB  # of seat i


apply = jax.jit(penalized)


@partial(jax.jit, static_argnames="variant")
def choose(logits: Any, arrays: SamplingArrays, by: Any, variant: Any) -> Sampled:
    return sample(logits, arrays, variant, by)


@jax.jit
def step(
    logits: Any, arrays: SamplingArrays, penalties: PenaltyArrays, newest: Any
) -> tuple[Sampled, Any]:
    """As in the compiled program: one computation."""
    by = penalized(logits, penalties, newest)
    return sample(logits, arrays, "penalized", by), by


def penalties_of(num_rows: int, **rows: dict[int, Any]) -> PenaltyArrays[np.ndarray]:
    """Neutral rows; `rows` are fields of them: prompt, output, seat, bias, presence..."""
    number, real = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32)
    penalties: PenaltyArrays[np.ndarray] = PenaltyArrays(
        history=np.full((num_rows, WIDTH), 7, np.int32),  # what is past num_known means nothing
        num_known=number.copy(),
        num_prompt=number.copy(),
        from_seat=number - 1,
        repetition=real + 1,
        presence=real.copy(),
        frequency=real.copy(),
        bias_ids=np.full((num_rows, MAX_LOGIT_BIAS), -1, np.int32),
        bias=np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32),
        mask=np.full((num_rows, -(-VOCAB // 32)), -1, np.int32),
    )
    for name in ("repetition", "presence", "frequency"):
        for row, value in rows.pop(name, {}).items():
            getattr(penalties, name)[row] = value
    for row, token_ids in rows.pop("prompt", {}).items():
        penalties.history[row, : len(token_ids)] = token_ids
        penalties.num_known[row] = penalties.num_prompt[row] = len(token_ids)
    for row, token_ids in rows.pop("output", {}).items():
        start = penalties.num_known[row]
        penalties.num_known[row] += len(token_ids)
        penalties.history[row, start : start + len(token_ids)] = token_ids
    for row, seat in rows.pop("seat", {}).items():
        penalties.from_seat[row] = seat
    for row, bias in rows.pop("bias", {}).items():
        penalties.bias_ids[row, : len(bias)] = list(bias)
        penalties.bias[row, : len(bias)] = list(bias.values())
    assert not rows
    return penalties


def adjusted(logits: np.ndarray, penalties: PenaltyArrays[np.ndarray]) -> np.ndarray:
    return np.asarray(apply(logits, penalties, NEWEST))


def draws(number: int, **arrays: Any) -> SamplingArrays[Any]:
    return SamplingArrays(
        temperature=np.float32(arrays.get("temperature", np.zeros(number))),
        top_k=np.int32(arrays.get("top_k", np.zeros(number))),
        top_p=np.ones(number, np.float32),
        min_p=np.zeros(number, np.float32),
        seeds=np.stack([np.arange(number)] * 2, axis=1).astype(np.uint32),
        positions=np.full(number, 5, np.int32),
    )


def run(
    logits: np.ndarray, penalties: PenaltyArrays[np.ndarray], **arrays: Any
) -> tuple[Sampled, np.ndarray]:
    """One step of float32[N, V]: what was sampled, and the logits that it was sampled by."""
    rows = draws(len(logits), **arrays)
    return jax.tree.map(np.asarray, step(logits, rows, penalties, NEWEST))


def run_full(logits: np.ndarray, **arrays: Any) -> Sampled:
    """The same without penalties."""
    rows = draws(len(logits), **arrays)
    return jax.tree.map(np.asarray, choose(logits, rows, None, "full"))


def counts_of(penalties: PenaltyArrays[np.ndarray], row: int) -> tuple[np.ndarray, np.ndarray]:
    """Slowly: how often each token is in the prompt and in the output."""
    history = penalties.history[row, : penalties.num_known[row]].tolist()
    if penalties.from_seat[row] >= 0:
        history.append(int(NEWEST[penalties.from_seat[row]]))
    at = int(penalties.num_prompt[row])
    return tuple(
        np.bincount(np.array(t, int), minlength=VOCAB) for t in (history[:at], history[at:])
    )  # type: ignore[return-value]


def by_formula(logits: np.ndarray, penalties: PenaltyArrays[np.ndarray], dtype: Any) -> np.ndarray:
    """OpenAI's and Hugging Face's formulas, in the order that is promised."""
    want = logits.astype(dtype)
    for row in range(len(logits)):
        for token_id, bias in zip(penalties.bias_ids[row], penalties.bias[row], strict=True):
            if token_id >= 0:
                want[row, token_id] += dtype(bias)
        in_prompt, in_output = counts_of(penalties, row)
        is_seen = in_prompt + in_output > 0
        repetition = dtype(penalties.repetition[row])
        seen = want[row, is_seen]
        want[row, is_seen] = np.where(seen > 0, seen / repetition, seen * repetition)
        want[row] -= in_output.astype(dtype) * dtype(penalties.frequency[row])
        want[row] -= (in_output > 0) * dtype(penalties.presence[row])
    return want


def random_case(num_rows: int, seed: int) -> tuple[np.ndarray, PenaltyArrays[np.ndarray]]:
    """Rows of every kind, tokens that repeat, histories of up to three tiles."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(num_rows, VOCAB)) * 8).astype(np.float32)
    some = [row for row in range(num_rows) if rng.random() < 0.7]
    penalties = penalties_of(
        num_rows,
        prompt={row: rng.integers(0, 60, rng.integers(1, 200)).tolist() for row in some},
        output={row: rng.integers(30, 80, rng.integers(0, 200)).tolist() for row in some},
        seat={row: row for row in some if rng.random() < 0.6},
        repetition={row: rng.uniform(0.5, 2) for row in some if rng.random() < 0.6},
        presence={row: rng.uniform(-2, 2) for row in some if rng.random() < 0.6},
        frequency={row: rng.uniform(-2, 2) for row in some if rng.random() < 0.6},
        bias={
            row: {int(i): rng.uniform(-100, 100) for i in rng.choice(VOCAB, MAX_LOGIT_BIAS)}
            for row in range(num_rows)
            if rng.random() < 0.3
        },
    )
    return logits, penalties


@pytest.mark.parametrize("num_rows", BUCKETS)
def test_logits_follow_the_formulas(num_rows: int):
    logits, penalties = random_case(num_rows, seed=num_rows)
    want = by_formula(logits, penalties, np.float64)
    np.testing.assert_allclose(adjusted(logits, penalties), want, rtol=2e-6, atol=2e-5)


def in_rounded_steps(x: np.ndarray, row: int, penalties: PenaltyArrays[np.ndarray]) -> np.ndarray:
    """Each operation rounded to float32 by itself, as numpy does it and a fused one does not."""
    one = np.float32(1)
    for token_id, bias in zip(penalties.bias_ids[row], penalties.bias[row], strict=True):
        if token_id >= 0:
            x[token_id] += bias
    in_prompt, in_output = counts_of(penalties, row)
    repetition = penalties.repetition[row]
    divided = x / np.where(x > 0, repetition, one / repetition)
    x = np.where(in_prompt + in_output > 0, divided, x)
    lowered, rest = x, penalties.frequency[row]
    for _ in range(3):
        part = (rest.view(np.int32) & np.int32(-(2**16))).view(np.float32)
        rest = rest - part
        lowered = lowered - in_output.astype(np.float32) * part
    assert rest == 0
    return np.where(in_output > 0, lowered - penalties.presence[row], x)


@pytest.mark.parametrize("num_rows", BUCKETS)
def test_every_bit_is_that_of_separately_rounded_operations(num_rows: int):
    """So no product and sum were fused, in any bucket."""
    logits, penalties = random_case(num_rows, seed=100 + num_rows)
    want = np.stack([in_rounded_steps(x.copy(), i, penalties) for i, x in enumerate(logits)])
    assert adjusted(logits, penalties).tobytes() == want.tobytes()


def take(arrays: Any, rows: np.ndarray) -> Any:
    return jax.tree.map(lambda array: array[rows], arrays)


def test_a_row_has_the_same_bits_at_any_place_of_any_bucket():
    logits, penalties = random_case(64, seed=1)
    arrays = draws(64, temperature=[0, 1, 0.7, 2] * 16, top_k=[0, 9, 0, 40] * 16)
    sampled, want = jax.tree.map(np.asarray, step(logits, arrays, penalties, NEWEST))
    rng = np.random.default_rng(2)
    for num_rows in BUCKETS:
        rows = rng.permutation(64)[:num_rows]
        mine = logits[rows], take(arrays, rows), take(penalties, rows), NEWEST
        part, got = jax.tree.map(np.asarray, step(*mine))
        assert got.tobytes() == want[rows].tobytes()
        for name in Sampled._fields:
            assert getattr(part, name).tobytes() == getattr(sampled, name)[rows].tobytes(), name


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_without_penalties_has_the_bits_of_the_full_variant(temperature: float):
    """In every bucket. Other variants and buckets have those bits too (test_sampling.py)."""
    logits, penalties = random_case(64, seed=3)
    logits[:, 5], logits[:, 6] = -0.0, -np.inf
    asks = (penalties.num_known > 0) | (penalties.bias_ids >= 0).any(axis=1)
    want = run_full(logits, temperature=np.full(64, temperature))
    for num_rows in BUCKETS:
        rows, neutral = np.arange(num_rows), ~asks[:num_rows]
        assert 0 < neutral.sum() < num_rows
        temperatures = np.full(num_rows, temperature)
        got, by = run(logits[rows], take(penalties, rows), temperature=temperatures)
        assert by[neutral].tobytes() == logits[rows][neutral].tobytes()
        assert by[~neutral].tobytes() != logits[rows][~neutral].tobytes()
        for name in Sampled._fields:
            mine, theirs = getattr(got, name), getattr(want, name)[rows]
            assert mine[neutral].tobytes() == theirs[neutral].tobytes(), name


def test_by_hand():
    """Token 1 twice in the output, token 2 in the prompt, token 3 in both, token 4 nowhere."""
    logits = np.zeros((8, VOCAB), np.float32)
    logits[0, 1:5] = [8, -3, 6, 5]
    penalties = penalties_of(
        8,
        prompt={0: [2, 3, 3, 2]},
        output={0: [1, 3, 1]},
        repetition={0: 2},
        presence={0: 0.5},
        frequency={0: 0.25},
        bias={0: {4: -1.5, 9: 100}},
    )
    got = adjusted(logits, penalties)
    assert got[0, 1:5].tolist() == [8 / 2 - 2 * 0.25 - 0.5, -3 * 2, 6 / 2 - 0.25 - 0.5, 3.5]
    assert got[0, 9] == 100
    assert not got[1:].any()


def test_the_bias_comes_before_the_repetition_penalty():
    logits = np.full((8, VOCAB), -1, np.float32)
    penalties = penalties_of(8, prompt={0: [3]}, repetition={0: 4}, bias={0: {3: 3}})
    assert adjusted(logits, penalties)[0, 3] == 2 / 4


def test_the_newest_token_is_counted_on_the_device():
    logits = np.zeros((8, VOCAB), np.float32)
    penalties = penalties_of(
        8,
        prompt={0: [1], 1: [1], 2: [1]},
        output={0: [int(NEWEST[4])], 2: [9]},
        seat={0: 4, 1: 6, 2: 0},
        frequency={0: 1, 1: 1, 2: 1},
    )
    got = adjusted(logits, penalties)
    assert {i: got[0, i] for i in np.flatnonzero(got[0])} == {NEWEST[4]: -2}
    assert {i: got[1, i] for i in np.flatnonzero(got[1])} == {NEWEST[6]: -1}
    assert {i: got[2, i] for i in np.flatnonzero(got[2])} == {NEWEST[0]: -1, 9: -1}
    assert not got[3:].any()


@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, WIDTH - 1, WIDTH])
def test_histories_of_every_length_are_counted_once(length: int):
    logits = np.zeros((8, VOCAB), np.float32)
    output = (np.arange(length) % 100).tolist()
    penalties = penalties_of(8, output={2: output, 5: output[:1]}, frequency={2: 1, 5: 1})
    got = adjusted(logits, penalties)
    np.testing.assert_array_equal(-got[2], np.bincount(output, minlength=VOCAB))
    assert got[5, 0] == got[5].sum() == -1


@pytest.mark.parametrize("frequency", [0.001, 1 / 3, -1.999999, 2.0])
def test_a_token_drawn_very_often_is_counted_exactly(frequency: float):
    logits = np.full((8, VOCAB), 0.1, np.float32)
    penalties = penalties_of(8, output={0: [11] * WIDTH}, frequency={0: frequency})
    want = by_formula(logits, penalties, np.float64)
    np.testing.assert_allclose(adjusted(logits, penalties), want, rtol=3e-7)


def test_neutral_penalties_change_no_bit_of_a_token_that_was_seen():
    logits, _ = random_case(8, seed=4)
    neutral = penalties_of(8, prompt={0: [1, 2, 3]}, output={0: [3, 4, 5, 6]}, seat={0: 1})
    logits[0, :7] = [1.5, -0.0, -0.0, 0.0, np.inf, -np.inf, 2e-38]
    assert adjusted(logits, neutral).tobytes() == logits.tobytes()


def test_logprobs_are_of_the_raw_distribution():
    logits, penalties = random_case(64, seed=5)
    raw = run_full(logits)
    got, by = run(logits, penalties)
    assert (got.token_ids == by.argmax(axis=1)).all()
    assert (got.token_ids != raw.token_ids).any()
    assert got.top_logprobs.tobytes() == raw.top_logprobs.tobytes()
    is_top = got.top_ids == got.token_ids[:, None]
    assert got.logprobs[is_top.any(axis=1)].tobytes() == got.top_logprobs[is_top].tobytes()


def test_draws_follow_the_penalized_distribution():
    """Temperature and filters come after: of equal tokens, those with a penalty are not drawn."""
    logits = np.zeros((64, VOCAB), np.float32)
    logits[:, 5:] = -np.inf
    penalties = penalties_of(
        64,
        output={row: [0, 1, 1] for row in range(64)},
        frequency=dict.fromkeys(range(64), 2),
        bias={row: {2: -100} for row in range(64)},
    )
    sampled, _ = run(logits, penalties, temperature=np.full(64, 1e-2))
    assert set(sampled.token_ids.tolist()) == {3, 4}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_still_shows_in_its_logprob_and_in_no_other(bad: float):
    logits, penalties = random_case(16, seed=6)
    want, _ = run(logits, penalties)
    logits[3, 17] = bad
    got, _ = run(logits, penalties)
    assert np.isnan(got.logprobs[3])
    assert 0 <= got.token_ids[3] < VOCAB
    others = np.arange(16) != 3
    assert got.logprobs[others].tobytes() == want.logprobs[others].tobytes()


@pytest.mark.parametrize("repetition", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_strongest_penalties_leave_numbers(repetition: float, temperature: float):
    logits = (np.random.default_rng(7).normal(size=(8, VOCAB)) * 100).astype(np.float32)
    penalties = penalties_of(
        8,
        prompt={row: list(range(VOCAB)) for row in range(8)},
        repetition=dict.fromkeys(range(8), repetition),
        presence=dict.fromkeys(range(8), -2),
        bias={row: {1: 100, 2: -100} for row in range(8)},
    )
    sampled, by = run(logits, penalties, temperature=np.full(8, temperature))
    assert np.isfinite(by).all()
    assert np.isfinite(sampled.logprobs).all()
    assert (sampled.token_ids < VOCAB).all()


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")  # torch and transformers warn about themselves
def test_the_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits, _ = random_case(8, seed=8)
    prompts = np.random.default_rng(9).integers(0, VOCAB, (8, 100))
    penalties = penalties_of(
        8,
        prompt={row: ids[:60].tolist() for row, ids in enumerate(prompts)},
        output={row: ids[60:].tolist() for row, ids in enumerate(prompts)},
        repetition=dict.fromkeys(range(8), 1.3),
    )
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    want = theirs(torch.tensor(prompts), torch.tensor(logits)).numpy()
    np.testing.assert_allclose(adjusted(logits, penalties), want, rtol=3e-7)
