"""Numbers by hand, and what must not become a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.quantization.evaluation import (
    LEAST_TOKENS,
    LogitRows,
    compare_rows,
    evaluate,
    windows_of,
)

LOG = np.log


def model(row: Callable[[int], list[float]], *, rows: int = 3) -> LogitRows:
    """Logits that depend on the token alone, some rows at a time."""

    def logit_rows(token_ids: np.ndarray) -> Iterator[np.ndarray]:
        logits = np.asarray([row(int(token)) for token in token_ids], np.float32)
        yield from (logits[i : i + rows] for i in range(0, len(logits), rows))

    return logit_rows


def fair(token: int) -> list[float]:
    return [0.0, 0.0]


def biased(token: int) -> list[float]:
    return [float(LOG(3.0)), 0.0]  # 3/4 and 1/4


def test_windows_overlap_by_the_token_that_follows():
    windows = windows_of(range(10), 3)
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows[0].dtype == np.int32


def test_windows_are_of_one_length_and_leave_little():
    assert [window.tolist() for window in windows_of(range(9), 5)] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
    ]
    for num_tokens in range(2, 60):
        windows = windows_of(range(num_tokens), 7)
        sizes = {len(window) - 1 for window in windows}
        assert len(sizes) == 1
        assert sizes <= set(range(1, 8))
        assert num_tokens - 1 - len(windows) * sizes.pop() < len(windows)


def test_each_window_of_a_model_that_wants_a_bos_begins_with_one():
    windows = windows_of(range(7), 3, bos=9)
    assert [window.tolist() for window in windows] == [[9, 0, 1], [9, 2, 3], [9, 4, 5]]
    assert windows[0].dtype == np.int32
    assert [window.tolist() for window in windows_of([4], 3, bos=9)] == [[9, 4]]
    assert windows_of([], 3, bos=9) == []


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_nothing_follows_nothing(num_tokens: int):
    assert windows_of(range(num_tokens), 3) == []


def test_one_row_by_hand():
    ours, theirs = np.array([[0.0, 0.0]], np.float32), np.array([[LOG(3.0), 0.0]], np.float32)
    kl, nll, original_nll, agrees = compare_rows(ours, theirs, np.array([1]))
    assert kl[0] == pytest.approx(0.5 * LOG(0.5 / 0.75) + 0.5 * LOG(0.5 / 0.25))
    assert nll[0] == pytest.approx(-LOG(0.25))
    assert original_nll[0] == pytest.approx(-LOG(0.5))
    assert agrees.tolist() == [True]  # a tie goes to the first


def test_an_addition_to_all_logits_changes_nothing():
    logits = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32) * 4
    kl, nll, original_nll, agrees = compare_rows(logits, logits + 64, np.arange(5))
    assert kl.max() < 1e-10
    assert nll == pytest.approx(original_nll, abs=1e-4)
    assert agrees.all()


def test_large_logits_do_not_overflow():
    kl, nll, *_ = compare_rows(
        np.array([[3e38, -3e38]], np.float32), np.array([[-3e38, 3e38]], np.float32), np.array([0])
    )
    assert np.isfinite(kl).all()
    assert np.isfinite(nll).all()


def test_a_model_costs_nothing_against_itself():
    found = evaluate(model(biased), model(biased), windows_of([0, 1] * 20, 8), least_tokens=1)
    assert (found.mean_kl, found.kl_p99, found.agreement) == (0.0, 0.0, 1.0)
    change = found.perplexity_change
    assert (change.value, change.low, change.high) == (0.0, 0.0, 0.0)
    assert found.perplexity == found.original_perplexity


def test_two_models_by_hand():
    followers = [0, 0, 1] * 27  # of 81 tokens; 80 have a follower
    found = evaluate(model(fair), model(biased), windows_of(followers, 16), least_tokens=80)
    assert found.num_tokens == 80
    assert found.mean_kl == pytest.approx(0.5 * LOG(4 / 3))
    assert found.original_perplexity.value == pytest.approx(2.0)
    share_of_1 = np.mean(np.array(followers[1:]) == 1)
    nll = share_of_1 * LOG(4.0) + (1 - share_of_1) * LOG(4 / 3)
    assert found.perplexity.value == pytest.approx(np.exp(nll))
    assert found.perplexity_change.value == pytest.approx(np.exp(nll) / 2 - 1)
    assert found.perplexity.low <= found.perplexity.value <= found.perplexity.high


def test_agreement_counts_positions():
    def other_after_1(token: int) -> list[float]:
        return [0.0, 1.0] if token == 1 else [1.0, 0.0]

    def always_0(token: int) -> list[float]:
        return [1.0, 0.0]

    windows = windows_of([*[0, 0, 0, 1] * 9, 0], 4)
    found = evaluate(model(always_0), model(other_after_1), windows, least_tokens=1)
    assert found.agreement == 0.75


def test_a_paired_change_is_surer_than_the_perplexities():
    rng = np.random.default_rng(0)
    hard = rng.normal(size=(50, 2)) * 3

    def ours(token: int) -> list[float]:
        return [*hard[token % 50]]

    def theirs(token: int) -> list[float]:
        return [hard[token % 50, 0] + 0.05, hard[token % 50, 1]]

    windows = windows_of(rng.integers(0, 2, size=2000).tolist(), 64)
    found = evaluate(model(ours), model(theirs), windows, least_tokens=1)
    of_change, of_one = found.perplexity_change, found.perplexity
    assert of_change.high - of_change.low < 0.2 * (of_one.high - of_one.low)


def test_too_little_text_is_refused_with_the_numbers():
    with pytest.raises(InvalidRequest, match=r"at least 10,000 tokens.* got 4 windows of 8 tokens"):
        evaluate(model(fair), model(fair), windows_of([0] * 33, 8))
    assert LEAST_TOKENS == 10_000
    with pytest.raises(InvalidRequest, match="0 windows"):
        evaluate(model(fair), model(fair), [], least_tokens=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["original", "quantized"])
def test_logits_that_are_not_finite_are_a_failure_that_names_model_and_place(
    bad: float, which: str
):
    def broken(token: int) -> list[float]:
        return [bad, 0.0] if token == 7 else [0.0, 0.0]

    models = [model(broken), model(fair)]
    first, second = models if which == "original" else models[::-1]
    windows = windows_of([0] * 12 + [7] + [0] * 12, 8)
    with pytest.raises(EngineFailure, match=f"{which} model .* window 1 after token 4"):
        evaluate(first, second, windows, least_tokens=1)


def test_progress_is_told_after_each_window():
    told: list[int] = []
    windows = windows_of([0] * 33, 8)
    evaluate(model(fair), model(fair), windows, least_tokens=1, on_window=lambda: told.append(1))
    assert len(told) == 4
