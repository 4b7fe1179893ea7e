"""One product's weight to integers, by the method that is asked for, and what it cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from checkpoints.formats import WeightFormat
from checkpoints.gptq import gptq
from checkpoints.learned_rounding import learn_rounding
from checkpoints.qtensor import QTensor
from checkpoints.rounding import round_to_nearest
from jaxinfer.quantization.layer_inputs import SiteInputs
from jaxinfer.quantization.recipe import Method

Floats = npt.NDArray[np.float32]


def rounded(
    weight: Floats, inputs: SiteInputs, kept: WeightFormat, method: Method, *, seed: int
) -> QTensor:
    """float32[N, K] in the format `kept`."""
    ways: dict[str, Callable[[], QTensor]] = {
        "nearest": lambda: round_to_nearest(weight, kept),
        "gptq": lambda: gptq(weight, inputs.hessian, kept),
        "learned": lambda: learn_rounding(weight, inputs.rows, kept, seed=seed),
    }
    if method != "auto":
        return ways[method]()
    names = ("nearest", "gptq") if kept.bits == 8 else ("gptq", "learned")
    found = [ways[name]() for name in names]
    return min(found, key=lambda q: relative_error(weight, q, inputs.hessian))


def relative_error(weight: Floats, quantized: QTensor, hessian: Floats) -> float:
    """rms(x @ (w - w')) / rms(x @ w) over the inputs whose x.T @ x is hessian; 0 of nothing."""
    before = _energy(weight, hessian)
    return (
        float(np.sqrt(_energy(quantized.dequantized() - weight, hessian) / before))
        if before
        else 0.0
    )


def _energy(weight: Floats, hessian: Floats) -> float:
    return max(0.0, float(np.sum((weight @ hessian) * weight, dtype=np.float64)))
