"""Calibration sets of random tokens."""

from __future__ import annotations

import numpy as np

from jaxinfer.quantization.calibration_set import CalibrationSet, Kind, Sample


def random_set(
    lengths: dict[Kind, list[int]], *, vocab_size: int = 256, seed: int = 0
) -> CalibrationSet:
    """Samples of each kind with so many tokens."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(kind, tuple(map(int, rng.integers(0, vocab_size, length))))
        for kind, all_of_kind in lengths.items()
        for length in all_of_kind
    ]
    return CalibrationSet.of("random", samples)
