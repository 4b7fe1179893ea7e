"""Whether a calibration set is enough to fix activation scales by, by criteria with numbers.

Static scales are as good as the ranges that were seen: a channel that reaches further in use is
clipped. So a set must be large, of all kinds, and its ranges must hold on samples kept apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.calibration_set import KINDS, CalibrationSet

Maxima = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Criteria:
    """What static activation quantization asks of a calibration set."""

    min_samples: int = 64
    min_tokens: int = 8192
    min_of_kind: int = 4  # samples of each kind
    min_covered: float = 0.98  # share of channels, at each site
    range_factor: float = 1.25  # a channel is covered up to this times the range that was seen


class NotEnoughCalibration(ConfigError):
    """A calibration set does not meet the criteria; `unmet` says which, with numbers."""

    def __init__(self, name: str, unmet: tuple[str, ...]):
        super().__init__(
            f"calibration set {name} is not enough for static activation scales: "
            f"{'; '.join(unmet)}. Give more texts with --calibration, or take dynamic scales"
        )
        self.unmet = unmet


def covered_share(calibration: Maxima, held_out: Maxima, *, factor: float) -> float:
    """The share of channels whose held-out range is within `factor` of the calibration's.

    Args:
        calibration, held_out: float32[K], largest magnitudes by channel.
        factor: at least 1.
    Raises: ValueError if the shapes differ, for no channels, or if a maximum is no finite number.
    """
    if calibration.shape != held_out.shape or calibration.ndim != 1 or not len(calibration):
        raise ValueError(
            f"expected maxima [K] of the same channels; got {calibration.shape} and "
            f"{held_out.shape}"
        )
    if not (np.isfinite(calibration).all() and np.isfinite(held_out).all()):
        raise ValueError("a channel's maximum is not finite; find the NaN or infinity first")
    return float(np.mean(held_out <= calibration * np.float32(factor)))


def check_enough(
    calibration: CalibrationSet,
    covered: Mapping[str, float],
    criteria: Criteria | None = None,
) -> None:
    """Passes if `calibration` meets every criterion.

    Args:
        covered: `covered_share` by site, between the two parts of `calibration.split()`.
        criteria: None: the default ones.
    Raises: NotEnoughCalibration listing all that is unmet.
    """
    unmet = tuple(_unmet(calibration, covered, criteria or Criteria()))
    if unmet:
        raise NotEnoughCalibration(calibration.name, unmet)


def _unmet(
    calibration: CalibrationSet, covered: Mapping[str, float], criteria: Criteria
) -> Iterator[str]:
    num_samples, num_tokens = len(calibration.samples), calibration.num_tokens
    if num_samples < criteria.min_samples:
        yield f"{num_samples} samples of at least {criteria.min_samples}"
    if num_tokens < criteria.min_tokens:
        yield f"{num_tokens} tokens of at least {criteria.min_tokens}"
    by_kind = Counter(sample.kind for sample in calibration.samples)
    for kind in KINDS:
        if by_kind[kind] < criteria.min_of_kind:
            yield f"{by_kind[kind]} {kind} samples of at least {criteria.min_of_kind}"
    for site, share in covered.items():
        if share < criteria.min_covered:
            yield (
                f"at {site} {share:.1%} of the channels stay within {criteria.range_factor:g} "
                f"times the range seen, of at least {criteria.min_covered:.1%}"
            )
