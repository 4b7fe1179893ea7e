"""Whether a calibration set is enough: every unmet criterion is named with its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.quantization.calibration_check import (
    Criteria,
    NotEnoughCalibration,
    check_enough,
    covered_share,
)
from jaxinfer.quantization.calibration_set import CalibrationSet, Kind, Sample

CRITERIA = Criteria(min_samples=6, min_tokens=12, min_of_kind=2, min_covered=0.75, range_factor=1.5)


def a_set(**counts: int) -> CalibrationSet:
    kinds: dict[str, Kind] = {"short": "short", "long": "long", "multi_turn": "multi_turn"}
    samples = [Sample(kinds[kind], (1, 2)) for kind, n in counts.items() for _ in range(n)]
    return CalibrationSet.of("mine.jsonl", samples)


def test_a_set_on_every_limit_passes():
    check_enough(a_set(short=2, long=2, multi_turn=2), {"layers.0.mlp": 0.75}, CRITERIA)


def test_everything_that_is_unmet_is_listed_with_numbers():
    with pytest.raises(NotEnoughCalibration, match=r"mine\.jsonl is not enough") as refused:
        check_enough(a_set(short=4, long=1), {"layers.0.mlp": 0.5, "layers.1.mlp": 0.9}, CRITERIA)
    assert refused.value.unmet == (
        "5 samples of at least 6",
        "10 tokens of at least 12",
        "1 long samples of at least 2",
        "0 multi_turn samples of at least 2",
        "at layers.0.mlp 50.0% of the channels stay within 1.5 times the range seen, "
        "of at least 75.0%",
    )


def test_a_tiny_set_is_not_enough_by_default():
    with pytest.raises(NotEnoughCalibration, match="6 samples of at least 64"):
        check_enough(a_set(short=2, long=2, multi_turn=2), {})


def test_a_channel_is_covered_up_to_the_factor():
    seen = np.array([1, 2, 0, 4], np.float32)
    later = np.array([1.25, 2.6, 0, 1], np.float32)
    assert covered_share(seen, later, factor=1.25) == 0.75


def test_a_channel_that_was_silent_in_calibration_is_not_covered_when_it_speaks():
    assert covered_share(np.zeros(2, np.float32), np.array([0, 1], np.float32), factor=2) == 0.5


@pytest.mark.parametrize("later", [[1.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_maxima_that_do_not_fit_or_are_no_numbers_are_refused(later: list[float]):
    with pytest.raises(ValueError, match=r"same channels|not finite"):
        covered_share(np.ones(2, np.float32), np.array(later, np.float32), factor=1.25)
