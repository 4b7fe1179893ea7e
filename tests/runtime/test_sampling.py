"""Sampling: the exact distributions, in numpy, and rows that do not know of each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.runtime.sampling import MAX_TOP, Sampled, SamplingArrays, sample

VARIANTS = ("greedy", "plain", "full")
NUM_DRAWS = 8192
LOGITS = np.log([0.30, 0.20, 0.15, 0.10, 0.08, 0.06, 0.04, 0.03, 0.02, 0.01, 0.006, 0.004])


@partial(jax.jit, static_argnames="variant")
def jitted(logits: Any, arrays: SamplingArrays, variant: Any) -> Sampled:
    return sample(logits, arrays, variant)


def run(logits: np.ndarray, variant: str = "full", **rows: Any) -> Sampled:
    """One step of float[N, V]; `rows` are SamplingArrays' fields, a value for all or for each row.

    Without a seed, row i has seed i.
    """
    num_rows = len(logits)
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seeds": np.stack([np.arange(num_rows), np.full(num_rows, 7)], axis=1),
        "positions": 5,
    }
    dtypes = {"top_k": np.int32, "positions": np.int32, "seeds": np.uint32}
    values = {
        name: np.broadcast_to(
            np.asarray(value, dtypes.get(name, np.float32)),
            (num_rows, 2) if name == "seeds" else (num_rows,),
        )
        for name, value in (defaults | rows).items()
    }
    sampled = jitted(np.asarray(logits, np.float32), SamplingArrays(**values), variant)
    return jax.tree.map(np.asarray, sampled)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(num_rows, vocab_size)) * 3).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def filtered(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The distribution to draw from: temperature, min-p, top-k, top-p, in this order."""
    weights = np.exp((logits - logits.max()) / temperature)
    weights[weights < min_p] = 0
    if top_k:
        weights[weights < np.sort(weights)[::-1][min(top_k, len(weights)) - 1]] = 0
    if top_p < 1:
        falling = np.sort(weights)[::-1]
        number = int(np.searchsorted(np.cumsum(falling), top_p * falling.sum())) + 1
        weights[weights < falling[min(number, len(falling)) - 1]] = 0
    return weights / weights.sum()


def assert_drawn_from(token_ids: np.ndarray, want: np.ndarray) -> None:
    """Total variation, and no token that has no probability."""
    counts = np.bincount(token_ids, minlength=len(want))
    assert len(counts) == len(want), "a token past the vocabulary"
    assert counts[want == 0].sum() == 0, f"drew {np.flatnonzero(counts * (want == 0))}"
    distance = np.abs(counts / len(token_ids) - want).sum() / 2
    assert distance < 0.02, f"total variation {distance:.3f}"


@pytest.mark.parametrize("variant", ["plain", "full"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_its_temperature(temperature: float, variant: str):
    logits = np.tile(LOGITS, (NUM_DRAWS, 1))
    sampled = run(logits, variant, temperature=temperature)
    assert_drawn_from(sampled.token_ids, filtered(LOGITS, temperature, 0, 1.0, 0.0))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (3, 1.0, 0.0),
        (11, 1.0, 0.0),
        (12, 1.0, 0.0),
        (500, 1.0, 0.0),
        (0, 0.05, 0.0),
        (0, 0.5, 0.0),
        (0, 0.93, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.05),
        (0, 1.0, 0.4),
        (0, 1.0, 1.0),
        (6, 0.8, 0.0),
        (4, 0.9, 0.3),
        (8, 0.7, 0.1),
    ],
)
def test_filters_leave_the_exact_distribution(
    top_k: int, top_p: float, min_p: float, temperature: float
):
    logits = np.tile(LOGITS, (NUM_DRAWS, 1))
    fields: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    want = filtered(LOGITS, **fields)
    assert_drawn_from(run(logits, **fields).token_ids, want)


def test_top_p_is_a_share_of_what_top_k_left():
    """0.30, 0.20, 0.15 remain; the first two are 77 % of these, but 50 % of all."""
    want = filtered(LOGITS, 1.0, 3, 0.75, 0.0)
    assert (want > 0).sum() == 2
    sampled = run(np.tile(LOGITS, (NUM_DRAWS, 1)), top_k=3, top_p=0.75)
    assert_drawn_from(sampled.token_ids, want)


def test_successive_positions_of_one_seed_are_independent_draws():
    logits = np.tile(LOGITS, (NUM_DRAWS, 1))
    ids = run(logits, "plain", seeds=[3, 4], positions=np.arange(NUM_DRAWS)).token_ids
    one = filtered(LOGITS, 1.0, 0, 1.0, 0.0)
    assert_drawn_from(ids, one)
    is_first = np.stack([ids[:-1] == 0, ids[1:] == 0])
    assert is_first.all(axis=0).mean() == pytest.approx(one[0] ** 2, abs=0.015)


@pytest.mark.parametrize("half", [0, 1])
def test_each_half_of_a_seed_counts(half: int):
    seeds = np.full((NUM_DRAWS, 2), 9, np.uint32)
    seeds[:, half] = np.arange(NUM_DRAWS)
    ids = run(np.tile(LOGITS, (NUM_DRAWS, 1)), "plain", seeds=seeds).token_ids
    assert_drawn_from(ids, filtered(LOGITS, 1.0, 0, 1.0, 0.0))


def test_a_vocabulary_of_many_blocks_is_drawn_from_evenly():
    """Tokens at the edges of the blocks that a draw sums first."""
    likely = [0, 255, 256, 511, 512, 700, 999]
    logits = np.full(1000, -np.inf)
    logits[likely] = np.log([0.05, 0.3, 0.1, 0.2, 0.05, 0.1, 0.2])
    sampled = run(np.tile(logits, (NUM_DRAWS, 1)), "plain")
    assert_drawn_from(sampled.token_ids, np.exp(logits))


def test_many_small_tokens_together_weigh_what_they_weigh():
    logits = np.zeros(5000)
    logits[17] = np.log(5000)
    ids = run(np.tile(logits, (2048, 1)), "plain").token_ids
    assert (ids == 17).mean() == pytest.approx(0.5, abs=0.03)
    others = np.sort(ids[ids != 17]) / 5000
    assert np.abs(others - np.linspace(0, 1, len(others))).max() < 0.05


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocab_size", [420, 1000])
def test_temperature_0_is_the_arg_max_beside_drawn_rows(vocab_size: int, variant: str):
    logits = random_logits(32, vocab_size)
    is_greedy = np.arange(32) % 3 != 0
    sampled = run(logits, variant, temperature=np.where(is_greedy, 0.0, 2.0), top_p=1.0, top_k=0)
    want = logits.argmax(axis=1)
    np.testing.assert_array_equal(sampled.token_ids[is_greedy], want[is_greedy])
    if variant != "greedy":
        assert (sampled.token_ids[~is_greedy] != want[~is_greedy]).any()


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_the_tightest_filters_are_the_arg_max(fields: dict[str, Any]):
    logits = random_logits(32, 420, seed=1)
    np.testing.assert_array_equal(run(logits, **fields).token_ids, logits.argmax(axis=1))


def test_greedy_takes_the_first_of_equals():
    logits = np.zeros((8, 420))
    logits[:, [7, 300]] = 2.0
    for variant in VARIANTS:
        assert (run(logits, variant, temperature=0.0).token_ids == 7).all()


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_tokens_that_tie_with_the_last_one_kept_are_kept(fields: dict[str, Any]):
    logits = np.log([0.3, 0.05, 0.3, 0.05, 0.3])
    ids = run(np.tile(logits, (NUM_DRAWS, 1)), **fields).token_ids
    assert_drawn_from(ids, np.array([1, 0, 1, 0, 1]) / 3)


@pytest.mark.parametrize("vocab_size", [420, 1000])
def test_a_draw_depends_on_seed_and_position_alone(vocab_size: int):
    """Any row, company, bucket and variant."""
    rng = np.random.default_rng(0)
    mine, seed, position = random_logits(1, vocab_size)[0], [123, 4567], 99
    (want,) = {int(i) for i in run(np.tile(mine, (8, 1)), seeds=seed, positions=99).token_ids}
    for num_rows in (8, 16, 32):
        for variant in ("plain", "full"):
            row = int(rng.integers(num_rows))
            logits = random_logits(num_rows, vocab_size, seed=row)
            seeds = rng.integers(0, 2**32, (num_rows, 2))
            positions = rng.integers(0, 1000, num_rows)
            fields: dict[str, Any] = {
                "temperature": rng.uniform(0, 2, num_rows),
                "top_k": rng.integers(0, 9, num_rows),
                "top_p": rng.uniform(0.1, 1, num_rows),
                "min_p": rng.uniform(0, 0.3, num_rows),
            }
            logits[row], seeds[row], positions[row] = mine, seed, position
            for name, value in (("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
                fields[name][row] = value
            got = run(logits, variant, seeds=seeds, positions=positions, **fields)
            assert got.token_ids[row] == want


def test_filtered_draws_do_not_depend_on_company_either():
    rng = np.random.default_rng(1)
    mine = random_logits(1, 1000)[0]
    fields: dict[str, Any] = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    want = run(np.tile(mine, (8, 1)), seeds=[5, 6], **fields)
    for num_rows in (8, 16, 32):
        row = int(rng.integers(num_rows))
        logits = random_logits(num_rows, 1000, seed=num_rows)
        logits[row] = mine
        company: dict[str, Any] = {
            "top_k": rng.integers(0, 9, num_rows),
            "top_p": rng.uniform(0.1, 1, num_rows),
        }
        for name, values in company.items():
            values[row] = fields[name]
        got = run(logits, seeds=[5, 6], **(fields | company))
        assert got.token_ids[row] == want.token_ids[0]
        assert got.logprobs[row].tobytes() == want.logprobs[0].tobytes()


def test_other_positions_and_other_seeds_draw_other_tokens():
    flat = np.zeros((32, 1000))
    by_position = run(flat, "plain", seeds=[1, 2], positions=np.arange(32)).token_ids
    by_seed = run(flat, "plain").token_ids
    assert len(set(by_position.tolist())) > 25
    assert len(set(by_seed.tolist())) > 25


@pytest.mark.parametrize("vocab_size", [420, 1000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_are_of_the_raw_distribution(variant: str, vocab_size: int):
    """Before temperature and filters."""
    logits = random_logits(32, vocab_size)
    sampled = run(logits, variant, temperature=0.5, top_k=3)
    want = log_softmax(logits)[np.arange(32), sampled.token_ids]
    np.testing.assert_allclose(sampled.logprobs, want, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [420, 1000])
def test_logprobs_have_the_same_bits_in_every_variant_and_bucket(vocab_size: int):
    logits = random_logits(32, vocab_size, seed=2)
    want = run(logits, "greedy").logprobs
    for num_rows in (8, 16, 32):
        for variant in VARIANTS:
            got = run(logits[:num_rows], variant, temperature=0.0)
            assert got.logprobs.tobytes() == want[:num_rows].tobytes()


def test_a_drawn_tokens_logprob_has_the_bits_of_its_place_among_the_likeliest():
    logits = random_logits(32, 420, seed=3)
    logits[:, 15:] = -np.inf
    full, plain = run(logits, "full"), run(logits, "plain")
    np.testing.assert_array_equal(full.token_ids, plain.token_ids)
    assert full.logprobs.tobytes() == plain.logprobs.tobytes()
    at = full.top_ids == full.token_ids[:, None]
    assert at.sum() == 32
    assert full.top_logprobs[at].tobytes() == full.logprobs.tobytes()


@pytest.mark.parametrize("vocab_size", [5, 21])
def test_the_likeliest_are_sorted_and_no_more_than_the_vocabulary(vocab_size: int):
    logits = random_logits(8, vocab_size, seed=4)
    sampled = run(logits)
    number = min(MAX_TOP, vocab_size)
    want = np.argsort(-logits, axis=1)[:, :number]
    np.testing.assert_array_equal(sampled.top_ids, want)
    np.testing.assert_allclose(
        sampled.top_logprobs, np.take_along_axis(log_softmax(logits), want, axis=1), atol=2e-6
    )
    assert (np.diff(sampled.top_logprobs, axis=1) <= 0).all()


@pytest.mark.parametrize("variant", ["greedy", "plain"])
def test_only_the_full_variant_has_the_likeliest(variant: str):
    assert run(random_logits(8, 420), variant).top_ids.shape == (8, 0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_shows_in_its_logprob_and_in_no_other(bad: float, variant: str):
    logits = random_logits(8, 420)
    want = run(logits, variant)
    logits[3, 17] = bad
    got = run(logits, variant)
    assert np.isnan(got.logprobs[3])
    assert 0 <= got.token_ids[3] < 420
    others = np.arange(8) != 3
    np.testing.assert_array_equal(got.token_ids[others], want.token_ids[others])
    assert got.logprobs[others].tobytes() == want.logprobs[others].tobytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_of_impossible_tokens_has_no_logprob(variant: str):
    logits = random_logits(8, 420)
    logits[2] = -np.inf
    assert np.isnan(run(logits, variant).logprobs).tolist() == [i == 2 for i in range(8)]


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.001}])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 2.0])
def test_an_impossible_token_is_never_drawn(temperature: float, fields: dict[str, Any]):
    rng = np.random.default_rng(5)
    logits = random_logits(32, 420, seed=5)
    impossible = rng.random((32, 420)) < 0.95
    impossible[:, 419] = False
    logits[impossible] = -np.inf
    sampled = run(logits, temperature=temperature, **fields)
    assert np.isfinite(logits[np.arange(32), sampled.token_ids]).all()
    assert np.isfinite(sampled.logprobs).all()


def test_the_lowest_temperatures_neither_overflow_nor_miss_the_likeliest():
    logits = 40 * random_logits(16, 420, seed=6)
    for variant in ("plain", "full"):
        sampled = run(logits, variant, temperature=1e-5)
        np.testing.assert_array_equal(sampled.token_ids, logits.argmax(axis=1))
