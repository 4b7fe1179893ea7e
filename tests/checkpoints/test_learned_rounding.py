"""Learned rounding: better than where it began, or that itself; the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints import learned_rounding as module
from checkpoints.formats import WeightFormat
from checkpoints.learned_rounding import learn_rounding
from checkpoints.qtensor import QTensor
from checkpoints.rounding import levels, round_to_nearest

ASYMMETRIC = WeightFormat(4, 32, True)
FORMATS = [ASYMMETRIC, pytest.param(WeightFormat(4, 32), marks=pytest.mark.slow)]  # a compile each
INPUTS = 80  # the last group is shorter


def world() -> tuple[np.ndarray, np.ndarray]:
    """A weight and inputs that go together."""
    rng = np.random.default_rng(0)
    mixed = rng.standard_normal((200, 20)) @ rng.standard_normal((20, INPUTS))
    inputs = (mixed + rng.standard_normal(mixed.shape)).astype(np.float32)
    return rng.standard_normal((12, INPUTS)).astype(np.float32), inputs


def output_error(quantized: QTensor, weight: np.ndarray, inputs: np.ndarray) -> float:
    return float(np.square(inputs @ (quantized.dequantized() - weight).T).mean())


def begun(weight: np.ndarray, inputs: np.ndarray, kept: WeightFormat) -> QTensor:
    return round_to_nearest(weight, kept, importance=np.square(inputs).mean(axis=0))


@pytest.mark.parametrize("kept", FORMATS)
def test_the_output_error_falls(kept: WeightFormat):
    weight, inputs = world()
    found = learn_rounding(weight, inputs, kept)
    before = output_error(begun(weight, inputs, kept), weight, inputs)
    assert output_error(found, weight, inputs) < 0.75 * before
    low, high = levels(kept)
    assert (found.q >= low).all()
    assert (found.q <= high).all()
    assert found.scale.dtype == np.float32
    assert (found.zero is not None) is kept.has_zero


@pytest.mark.slow
def test_steps_that_only_harm_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    weight, inputs = world()
    kept = ASYMMETRIC
    monkeypatch.setattr(module, "RATE", 50.0)
    found = learn_rounding(weight, inputs, kept, num_steps=3)
    want = begun(weight, inputs, kept)
    assert output_error(found, weight, inputs) <= output_error(want, weight, inputs) * (1 + 1e-4)


def test_a_seed_gives_the_same_integers_and_another_others():
    weight, inputs = world()
    kept = ASYMMETRIC
    first, same, other = (learn_rounding(weight, inputs, kept, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.q, same.q)
    np.testing.assert_array_equal(first.scale, same.scale)
    assert (first.q != other.q).any()


def test_a_shape_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    weight, inputs = world()
    learn_rounding(weight, inputs, ASYMMETRIC)
    monkeypatch.setattr(module, "_errors", None)  # only tracing would call it
    learn_rounding(weight * 2, inputs + 1, ASYMMETRIC, seed=9)


@pytest.mark.parametrize("kept", FORMATS)
def test_odd_groups_stay_sound(kept: WeightFormat):
    weight, inputs = world()
    weight[0] = 0
    weight[1, :64] = 0
    weight[2, 3] = 1e4
    weight[3] = 1e-40
    weight[4] = 0.25
    inputs[:, 7] = 0
    found = learn_rounding(weight, inputs, kept)
    meant = found.dequantized()
    assert np.isfinite(meant).all()
    assert (meant[[0, 3]] == 0).all()
    assert (meant[1, :64] == 0).all()
    before = output_error(begun(weight, inputs, kept), weight, inputs)
    assert output_error(found, weight, inputs) <= before * (1 + 1e-4)


def test_what_cannot_be_learned_from_is_refused():
    weight, inputs = world()
    kept = WeightFormat(4, 32)
    for bad in (inputs[:, :5], inputs[:0], inputs[0]):
        with pytest.raises(ValueError, match="inputs of 80 channels"):
            learn_rounding(weight, bad, kept)
    with pytest.raises(ValueError, match="finite"):
        learn_rounding(weight, np.full_like(inputs, np.nan), kept)
    with pytest.raises(ValueError, match="at least 1"):
        learn_rounding(weight, inputs, kept, num_steps=0)
