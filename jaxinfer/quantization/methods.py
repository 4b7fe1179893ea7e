"""One product's weight to integers, by the method that is asked for, and what it cost."""

from __future__ import annotations

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
    chosen = _better(weight, inputs, kept) if method == "auto" else method
    match chosen:
        case "weighted":
            return _weighted(weight, inputs.all_hessian, kept)
        case "gptq":
            return gptq(weight, inputs.all_hessian, kept)
        case "learned":
            return learn_rounding(weight, inputs.rows, kept, seed=seed)
        case _:
            return round_to_nearest(weight, kept)


def _better(weight: Floats, inputs: SiteInputs, kept: WeightFormat) -> str:
    """What does better on inputs that it did not see."""
    ways = {"gptq": gptq, "weighted": _weighted}
    tried = {name: way(weight, inputs.hessian, kept) for name, way in ways.items()}
    return min(tried, key=lambda name: relative_error(weight, tried[name], inputs.held_hessian))


def _weighted(weight: Floats, hessian: Floats, kept: WeightFormat) -> QTensor:
    """To the nearest, clipped by how loud the inputs are."""
    return round_to_nearest(weight, kept, importance=np.diagonal(hessian))


def relative_error(weight: Floats, quantized: QTensor, hessian: Floats | None) -> float:
    """rms(x @ (w - w')) / rms(x @ w) over the inputs whose x.T @ x is hessian; 0 of nothing.

    hessian: None: of inputs that are alike and independent.
    """
    before = _energy(weight, hessian)
    return (
        float(np.sqrt(_energy(quantized.dequantized() - weight, hessian) / before))
        if before
        else 0.0
    )


def _energy(weight: Floats, hessian: Floats | None) -> float:
    product = weight if hessian is None else weight @ hessian
    return max(0.0, float(np.sum(product * weight, dtype=np.float64)))
