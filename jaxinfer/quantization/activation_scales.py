"""One static int8 scale for the inputs of a site, by least error over calibration inputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pallas_kernels.integer_matmul import LEVELS

Floats = npt.NDArray[np.float32]
NUM_STEPS = 24  # of clipping, each by a fourth root of 2: down to 1/64 of the largest magnitude


def static_scale(rows: Floats, largest: float, energy: Floats) -> float:
    """The scale whose rounding and clipping cost least at the outputs.

    Args:
        rows: float32[R, K], inputs.
        largest: magnitude of all inputs, also those that are not in rows.
        energy: float32[K], what an error in a channel weighs: the sum of its weights' squares.
    Returns: a float32 above 0.
    """
    if largest == 0:
        return 1.0
    scales = np.float32(largest / LEVELS) * 2.0 ** (-np.arange(NUM_STEPS + 1) / 4)
    errors = [_error(rows, np.float32(scale), energy) for scale in scales]
    return float(np.float32(scales[int(np.argmin(errors))]))


def _error(rows: Floats, scale: np.float32, energy: Floats) -> float:
    rounded = np.clip(np.rint(rows / scale), -LEVELS, LEVELS) * scale
    return float(np.square(rounded - rows).sum(axis=0, dtype=np.float64) @ energy)
