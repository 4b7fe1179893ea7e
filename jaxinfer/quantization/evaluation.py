"""What a quantized model costs: its distributions against the original's over held-out text.

Knows models as functions from token ids to rows of logits. Everything that is summed is float64, on
the host; at any time a few rows of logits of both models exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkpoints.certificate import Perplexity
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.quantization.confidence import blocks_of, interval

LEAST_TOKENS = 10_000  # that agreement and perplexity are told over
WINDOW = 512  # tokens that a model sees at once

LogitRows = Callable[[np.ndarray], Iterator[np.ndarray]]
"""int32[T] -> float32[R, V] in order, R rows at a time, T in all."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of W windows of T tokens; each array has a number per token, about the one that follows."""

    kl: np.ndarray  # float64[W, T], KL(original || quantized), nats
    nll: np.ndarray  # float64[W, T], of the token that follows, by the quantized model, nats
    original_nll: np.ndarray
    agrees: np.ndarray  # bool[W, T]: both think the same token likeliest
    seed: int  # of the intervals

    @property
    def num_tokens(self) -> int:
        return self.kl.size

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def kl_p99(self) -> float:
        return float(np.percentile(self.kl, 99))

    @property
    def agreement(self) -> float:
        return float(self.agrees.mean())

    @property
    def perplexity(self) -> Perplexity:
        return self._exponential(self.nll)

    @property
    def original_perplexity(self) -> Perplexity:
        return self._exponential(self.original_nll)

    @property
    def perplexity_change(self) -> Perplexity:
        """Ratio - 1. Paired by token: most of what makes a text hard is the same for both, so this
        is far surer than the two perplexities."""
        found = self._exponential(self.nll - self.original_nll)
        return Perplexity(found.value - 1, found.low - 1, found.high - 1)

    def _exponential(self, nll: np.ndarray) -> Perplexity:
        low, high = interval(nll, seed=self.seed)
        return Perplexity(*(float(np.exp(mean)) for mean in (nll.mean(), low, high)))


def windows_of(
    token_ids: Sequence[int], max_tokens: int = WINDOW, *, bos: int | None = None
) -> list[np.ndarray]:
    """A text as int32[T + 1] windows: T tokens and the one after.

    T is at most `max_tokens`, the same for all, and such that fewer tokens are left over at the
    end than there are windows.

    Args:
        bos: what each window begins with, for a model that reads no text without; not in the text.
    """
    ids = np.asarray(token_ids, np.int32)
    start = np.array([] if bos is None else [bos], np.int32)
    own = 1 - len(start)  # tokens of the text that a window begins with, and nothing predicts
    num_predicted = len(ids) - own
    num_windows = -(-num_predicted // max_tokens)
    if num_windows < 1:
        return []
    size = num_predicted // num_windows
    return [
        np.concatenate([start, ids[i * size : (i + 1) * size + own]]) for i in range(num_windows)
    ]


def evaluate(
    original: LogitRows,
    quantized: LogitRows,
    windows: Sequence[np.ndarray],
    *,
    least_tokens: int = LEAST_TOKENS,
    seed: int = 0,
    on_window: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Both models over all windows.

    Args:
        windows: of `windows_of`, not used in calibration.
        least_tokens: fewer are refused.
        on_window: called after each.
    Raises: InvalidRequest for too little text; EngineFailure for logits that are not finite.
    """
    _check_enough(windows, least_tokens)
    found: list[tuple[np.ndarray, ...]] = []
    for number, window in enumerate(windows):
        rows = _window(original, quantized, window, number)
        found.append(tuple(np.concatenate(parts) for parts in zip(*rows, strict=True)))
        on_window()
    kl, nll, original_nll, agrees = (np.stack(parts) for parts in zip(*found, strict=True))
    return Evaluation(kl, nll, original_nll, agrees, seed)


def _check_enough(windows: Sequence[np.ndarray], least_tokens: int) -> None:
    size = len(windows[0]) - 1 if windows else 0
    if len(windows) * size < least_tokens or blocks_of(len(windows), size) < 2:
        raise InvalidRequest(
            f"the held-out text must have at least {least_tokens:,} tokens in windows of one "
            f"length, and two blocks for an interval; got {len(windows)} windows of {size} tokens "
            "(give a longer text, or lower the number on purpose)"
        )


def _window(
    original: LogitRows, quantized: LogitRows, window: np.ndarray, number: int
) -> Iterator[tuple[np.ndarray, ...]]:
    start = 0
    for ours, theirs in zip(original(window[:-1]), quantized(window[:-1]), strict=True):
        stop = start + len(ours)
        for name, logits in (("original", ours), ("quantized", theirs)):
            _check_finite(logits, f"the {name} model", f"window {number}", start)
        yield compare_rows(ours, theirs, window[1 + start : 1 + stop])
        start = stop


def _check_finite(logits: np.ndarray, model: str, window: str, start: int) -> None:
    is_bad = ~np.isfinite(logits).all(axis=1)
    if is_bad.any():
        at = start + int(is_bad.argmax())
        raise EngineFailure(f"{model} gave NaN or infinite logits in {window} after token {at}")


def compare_rows(
    original: np.ndarray, quantized: np.ndarray, following: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two float32[R, V] of logits and the tokens int32[R] that followed.

    Returns: KL(original || quantized), both models' negative log-likelihoods, the quantized one's
        first, float64[R] each; and bool[R], whether the likeliest tokens are the same.
    """
    log_p, log_q = _log_softmax(original), _log_softmax(quantized)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    rows = np.arange(len(following))
    agrees = original.argmax(axis=1) == quantized.argmax(axis=1)
    return np.maximum(kl, 0.0), -log_q[rows, following], -log_p[rows, following], agrees


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
