"""GPTQ: integers chosen one input after another, each making up for the errors before it
(arXiv:2210.17323).

In the form of a decision feedback (arXiv:2507.18553): with H = L L^T, L lower triangular, the
output error of a row of errors e is |e L|^2, whose part j knows of the inputs from j on only. So
inputs are rounded from the last to the first, and the inverse of H is not needed. Numpy only.
"""

from __future__ import annotations

import numpy as np

from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor
from checkpoints.rounding import finite, levels, scales_of

BLOCK = 64  # inputs whose feedback on earlier ones is added in one product
DAMPING = 0.1  # on text that 2048 tokens of calibration had not met, SmolLM2's products err 7 to
# 30 % less than with the paper's 0.01
LEAST_DAMPING = 1e-6  # where it has to be raised from nothing
MAX_DAMPING = 10.0  # more than any matrix of squares needs


def gptq(
    weight: np.ndarray,
    hessian: np.ndarray,
    kept: WeightFormat,
    *,
    act_order: bool = True,
    damping: float = DAMPING,
) -> QTensor:
    """A weight whose products with calibrated inputs differ least, greedily.

    Args:
        weight: float[N, K].
        hessian: float[K, K], X^T X / tokens of the inputs.
        act_order: begin with the inputs of most power. Groups are those of the inputs' own order
            and their scales are found before, so that no order needs to be kept.
        damping: added to the diagonal, as a share of its mean; raised until H is definite.
    Raises: ValueError for numbers that are not finite, or a hessian of another size.
    """
    weight, hessian = finite(weight), finite(hessian)
    num_inputs = weight.shape[1]
    if hessian.shape != (num_inputs, num_inputs):
        raise ValueError(
            f"expected a hessian of {num_inputs} x {num_inputs} inputs, got {hessian.shape}"
        )
    power = np.diagonal(hessian)
    scale, zero = scales_of(weight, kept, importance=power)
    order = np.argsort(power, kind="stable") if act_order else np.arange(num_inputs)[::-1]
    factor = _factor(hessian[np.ix_(order, order)], damping)
    rows = _rounded(weight.T[order], factor, _Grid(scale, zero, kept, order))
    q = np.empty(weight.shape, np.int8)
    q[:, order] = rows.T
    return QTensor(q, scale, zero, kept)


class _Grid:
    """The values that a weight may take, by its place in the order."""

    def __init__(
        self, scale: np.ndarray, zero: np.ndarray | None, kept: WeightFormat, order: np.ndarray
    ):
        self._group = order // (kept.group_size or len(order))
        self._scale, (low, high) = scale, levels(kept)
        self._inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        self._zero = np.zeros_like(scale) if zero is None else zero.astype(np.float32)
        self._low, self._high = low - self._zero, high - self._zero

    def nearest(self, place: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32[N] -> the integers nearest to them, and what these are worth."""
        group = self._group[place]
        steps = np.rint(values * self._inverse[group])
        np.clip(steps, self._low[group], self._high[group], out=steps)
        return steps + self._zero[group], steps * self._scale[group]


def _rounded(weight: np.ndarray, factor: np.ndarray, grid: _Grid) -> np.ndarray:
    """float32[K, N] in the order -> its integers, int8."""
    num_inputs = len(weight)
    errors = np.zeros_like(weight)
    q = np.empty(weight.shape, np.int8)
    for end in range(num_inputs, 0, -BLOCK):
        start = max(0, end - BLOCK)
        wanted = weight[start:end] + factor[end:, start:end].T @ errors[end:]
        for place in range(end - 1, start - 1, -1):
            feedback = factor[place + 1 : end, place] @ errors[place + 1 : end]
            own = wanted[place - start] + feedback
            q[place], value = grid.nearest(place, own)
            errors[place] = weight[place] - value
    return q


def _factor(hessian: np.ndarray, damping: float) -> np.ndarray:
    """float32[K, K]: L of L L^T = H + damping, each column divided by its diagonal.

    An input that is always 0 has no part in any other's error: it is rounded to the nearest.
    """
    hessian = hessian.astype(np.float64)
    power = np.diagonal(hessian).copy()
    mean = power.mean() if power.any() else 1.0
    while damping <= MAX_DAMPING:
        damped = hessian + np.diag(np.where(power > 0, damping * mean, mean))
        try:
            lower = np.linalg.cholesky(damped)
        except np.linalg.LinAlgError:
            damping = max(10 * damping, LEAST_DAMPING)
            continue
        return (lower / np.diagonal(lower)).astype(np.float32)
    raise ValueError("expected a hessian of real inputs (X^T X), found one far from definite")
