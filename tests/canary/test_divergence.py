"""The KL of two short lists, beside the KL of the whole distributions that they are of."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxinfer.canary.divergence import kl_at_least, nll_increase, shadow_facts
from jaxinfer.outputs import TokenLogprob

VOCAB = 300


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())


def row_of(logprobs: np.ndarray, token_id: int, *, num_top: int = 20) -> TokenLogprob:
    """As an engine gives it: float32."""
    narrow = logprobs.astype(np.float32)
    likeliest = np.argsort(-narrow, kind="stable")[:num_top]
    top = tuple((int(i), float(narrow[i])) for i in likeliest)
    return TokenLogprob(token_id, float(narrow[token_id]), top)


def true_kl(stable: np.ndarray, canary: np.ndarray) -> float:
    return float((np.exp(stable) * (stable - canary)).sum())


def listed(token_id: int, **probabilities: float) -> TokenLogprob:
    """t0=0.5, t7=0.2: the listed tokens; one of them stands in the text."""
    top = tuple((int(name[1:]), math.log(p)) for name, p in probabilities.items())
    return TokenLogprob(token_id, dict(top).get(token_id, math.log(0.001)), top)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3, 3.0, 30.0])
def test_it_is_never_above_the_true_divergence(scale: float, noise: float):
    rng = np.random.default_rng(int(10 * scale + 1000 * noise))
    for _ in range(20):
        logits = rng.normal(0, scale, VOCAB)
        stable, canary = log_softmax(logits), log_softmax(logits + rng.normal(0, noise, VOCAB))
        token_id = int(rng.integers(VOCAB))
        bound = kl_at_least(row_of(stable, token_id), row_of(canary, token_id))
        assert 0 <= bound <= true_kl(stable, canary) + 5e-6


def test_it_is_close_where_the_heads_agree():
    """A peaked next token, as a model's are, and a canary with a little noise."""
    rng = np.random.default_rng(0)
    bounds, truths = list[float](), list[float]()
    for _ in range(100):
        logits = rng.normal(0, 4, VOCAB)
        stable, canary = log_softmax(logits), log_softmax(logits + rng.normal(0, 0.3, VOCAB))
        bounds.append(kl_at_least(row_of(stable, 0), row_of(canary, 0)))
        truths.append(true_kl(stable, canary))
    assert sum(truths) > 1
    assert 0.9 * sum(truths) < sum(bounds) <= sum(truths)


def test_equal_versions_do_not_differ():
    logprobs = log_softmax(np.random.default_rng(0).normal(0, 3, VOCAB))
    assert kl_at_least(row_of(logprobs, 5), row_of(logprobs, 5)) == 0.0


def test_tokens_that_only_one_side_lists_are_one_rest():
    """Token 1 is common; the rest is 0.4 and 0.5, of which token 0 may well have its share."""
    stable, canary = listed(1, t1=0.6, t0=0.3), listed(1, t1=0.5, t2=0.4)
    expected = 0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)
    assert kl_at_least(stable, canary) == pytest.approx(expected)


def test_a_token_that_the_canary_does_not_list_is_at_most_its_last_listed_one():
    stable, canary = listed(1, t0=0.9, t1=0.05), listed(1, t1=0.5, t2=0.1)
    expected = 0.9 * math.log(0.9 / 0.1) + 0.05 * math.log(0.05 / 0.5)
    expected += 0.05 * math.log(0.05 / 0.4)
    assert kl_at_least(stable, canary) == pytest.approx(expected)


def test_a_canary_that_is_sure_of_another_token_is_far_away_and_finite():
    stable, canary = listed(1, t1=1.0), listed(1, t2=1.0)
    canary.logprob = -math.inf
    assert kl_at_least(stable, canary) == pytest.approx(200, abs=0.1)
    assert nll_increase(stable, canary) == 200


def test_the_token_of_the_text_is_compared_though_nobody_lists_it():
    stable, canary = listed(7, t1=0.9), listed(7, t1=0.9)
    canary.logprob -= 1
    assert kl_at_least(stable, canary) > 0
    assert nll_increase(stable, canary) == pytest.approx(1)


def test_rows_of_two_tokens_are_not_compared():
    with pytest.raises(ValueError, match="rows of one token"):
        kl_at_least(listed(1, t1=0.9), listed(2, t1=0.9))


def test_facts_are_means_over_the_tokens_that_both_have():
    rng = np.random.default_rng(0)
    stable = [row_of(log_softmax(rng.normal(0, 2, VOCAB)), i) for i in range(3)]
    canary = [row_of(log_softmax(rng.normal(0, 2, VOCAB)), i) for i in range(2)]
    facts = shadow_facts(stable, canary)
    assert facts is not None
    pairs = list(zip(stable[:2], canary, strict=True))
    assert facts.num_tokens == 2
    assert facts.kl == pytest.approx(sum(kl_at_least(a, b) for a, b in pairs) / 2)
    assert facts.nll_increase == pytest.approx(sum(a.logprob - b.logprob for a, b in pairs) / 2)
    assert shadow_facts([], canary) is None
