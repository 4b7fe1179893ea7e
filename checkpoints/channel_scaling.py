"""Scales per input channel, moved from a product's inputs into its weights before both are rounded
(AWQ, arXiv:2306.00978; SmoothQuant, arXiv:2211.10438).

Where the inputs' division is folded in (a norm, the product before) is the caller's. Numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkpoints.formats import WeightFormat
from checkpoints.rounding import finite, round_to_nearest

ALPHAS = tuple(i / 10 for i in range(1, 11))  # how much is moved; 0, nothing, is tried too
MAX_ROWS = 512  # of the inputs, evenly spaced, that candidates are judged by
LEAST = 1e-5  # of the largest channel: a quieter one counts as this loud
LEVELS = 127  # of int8 inputs, on each side of 0


@dataclass(frozen=True, slots=True)
class ChannelScales:
    """Weights are multiplied by them, inputs divided."""

    scales: np.ndarray  # float32[K], finite, positive
    alpha: float  # 0: nothing is moved, scales are 1
    error: float  # squared output error of the rounded products, over the squared outputs
    error_before: float  # the same with nothing moved


def search_scales(
    weights: Sequence[np.ndarray],
    inputs: np.ndarray,
    kept: WeightFormat,
    *,
    tied: int = 1,
    head_dim: int | None = None,
) -> ChannelScales:
    """Those of least output error among no migration, SmoothQuant's and AWQ's.

    Args:
        weights: float[N_i, K] of the products that share these inputs.
        inputs: float[T, K] from calibration.
        kept: how weights and inputs are rounded.
        tied: query heads that share a KV head, and so its scales, where the inputs are an
            attention's outputs; head_dim: their size.
    Raises: ValueError for numbers that are not finite, or sizes that do not fit.
    """
    weights, inputs = [finite(weight) for weight in weights], finite(inputs)
    heads = _heads(inputs.shape[1], tied, head_dim)
    sample = inputs[:: -(-len(inputs) // MAX_ROWS)]
    trial = _Trial(weights, sample, np.square(inputs).mean(axis=0), kept)
    nothing = np.ones(inputs.shape[1], np.float32)
    before = trial.error(nothing)
    best = ChannelScales(nothing, 0.0, before, before)
    for alpha, scales in _candidates(weights, inputs, heads):
        error = trial.error(scales)
        if error < best.error:
            best = ChannelScales(scales, alpha, error, before)
    return best


class _Trial:
    """Rounds the products under a candidate, and compares."""

    def __init__(
        self,
        weights: Sequence[np.ndarray],
        inputs: np.ndarray,
        power: np.ndarray,
        kept: WeightFormat,
    ):
        self._weights, self._inputs, self._power, self._kept = weights, inputs, power, kept
        self._wanted = [inputs @ weight.T for weight in weights]
        self._outputs = sum(float(np.square(wanted).sum()) for wanted in self._wanted)

    def error(self, scales: np.ndarray) -> float:
        x, importance = self._rounded(self._inputs / scales), self._power / np.square(scales)
        lost = 0.0
        for weight, wanted in zip(self._weights, self._wanted, strict=True):
            rounded = round_to_nearest(weight * scales, self._kept, importance=importance)
            lost += float(np.square(x @ rounded.dequantized().T - wanted).sum())
        return lost / self._outputs if self._outputs > 0 else 0.0

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        if self._kept.activations == "float":
            return x
        by_row = self._kept.activations == "int8"
        scale = np.abs(x).max(axis=1, keepdims=True) if by_row else np.abs(x).max()
        scale = np.maximum(scale / LEVELS, np.finfo(np.float32).tiny)
        return np.clip(np.rint(x / scale), -LEVELS, LEVELS) * scale


def _heads(num_inputs: int, tied: int, head_dim: int | None) -> tuple[int, int, int]:
    """How to see the channels: [KV heads, tied, head_dim]; only `tied` shares scales."""
    size = num_inputs if tied == 1 else (head_dim or 0)
    if size < 1 or num_inputs % (tied * size):
        raise ValueError(
            f"expected head_dim with {tied} tied heads that divide {num_inputs} inputs, "
            f"got {head_dim}"
        )
    return num_inputs // (tied * size), tied, size


def _candidates(
    weights: Sequence[np.ndarray], inputs: np.ndarray, heads: tuple[int, int, int]
) -> Iterator[tuple[float, np.ndarray]]:
    loudest = _floored(_shared(np.abs(inputs).max(axis=0), heads))
    usual = _floored(_shared(np.abs(inputs).mean(axis=0), heads))
    heaviest = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
    heaviest = _floored(_shared(heaviest, heads))
    for alpha in ALPHAS:
        yield alpha, _normalised(loudest**alpha / heaviest ** (1 - alpha))
        yield alpha, _normalised(usual**alpha)


def _shared(per_channel: np.ndarray, heads: tuple[int, int, int]) -> np.ndarray:
    """The largest among the tied heads, at each of them."""
    by_head = per_channel.reshape(heads)
    return np.broadcast_to(by_head.max(axis=1, keepdims=True), heads).reshape(-1)


def _floored(per_channel: np.ndarray) -> np.ndarray:
    wide = per_channel.astype(np.float64)
    return np.maximum(wide, max(LEAST * wide.max(), np.finfo(np.float32).tiny))


def _normalised(scales: np.ndarray) -> np.ndarray:
    """float32, of geometric mean 1."""
    return (scales / np.exp(np.log(scales).mean())).astype(np.float32)
