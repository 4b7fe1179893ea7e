"""Channel scales: moved only where rounding costs less for it."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints.channel_scaling import search_scales
from checkpoints.formats import WeightFormat
from checkpoints.rounding import round_to_nearest

INT4 = WeightFormat(4, 32)
INT8_INPUTS = WeightFormat(8, activations="int8")
CHANNELS = 96


def world(loud: float = 60.0, num_tokens: int = 300) -> tuple[list[np.ndarray], np.ndarray]:
    """Two products of inputs with three loud channels."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((num_tokens, CHANNELS)).astype(np.float32)
    inputs[:, [3, 40, 41]] *= loud
    return [rng.standard_normal((n, CHANNELS)).astype(np.float32) for n in (16, 8)], inputs


def rounded_rows(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.rint(x / scale) * scale


@pytest.mark.parametrize("activations", ["int8", "int8_static"])
def test_loud_channels_move_into_the_weights_of_int8_inputs(activations):
    weights, inputs = world()
    found = search_scales(weights, inputs, WeightFormat(8, activations=activations))
    assert found.alpha > 0
    assert found.error < 0.1 * found.error_before
    quiet = np.delete(np.arange(CHANNELS), [3, 40, 41])
    assert found.scales[[3, 40, 41]].min() > 3 * found.scales[quiet].max()


def test_weights_of_4_bits_round_less_where_inputs_are_loud():
    weights, inputs = world(loud=10)
    found = search_scales(weights, inputs, INT4)
    assert 0 < found.alpha <= 1
    assert found.error < 0.7 * found.error_before


def test_the_errors_are_those_of_the_products():
    weights, inputs = world(num_tokens=100)
    found = search_scales(weights, inputs, INT8_INPUTS)
    for scales, error in ((found.scales, found.error), (1, found.error_before)):
        lost = all_of = 0.0
        for weight in weights:
            meant = round_to_nearest(weight * scales, INT8_INPUTS).dequantized()
            want = inputs @ weight.T
            lost += np.square(rounded_rows(inputs / scales) @ meant.T - want).sum()
            all_of += np.square(want).sum()
        assert error == pytest.approx(lost / all_of, rel=1e-4)


@pytest.mark.parametrize("kept", [INT4, INT8_INPUTS], ids=lambda kept: kept.name)
def test_nothing_moves_where_nothing_is_gained(kept: WeightFormat):
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], (64, CHANNELS)).astype(np.float32)
    found = search_scales([signs[:8] * 7], signs, kept)  # exact already
    assert found.alpha == 0
    assert (found.scales == 1).all()
    assert found.error == found.error_before


def test_scales_are_positive_of_mean_1_and_change_no_product():
    weights, inputs = world()
    found = search_scales(weights, inputs, INT8_INPUTS)
    assert found.scales.dtype == np.float32
    assert np.exp(np.log(found.scales).mean()) == pytest.approx(1, rel=1e-3)
    moved = (inputs / found.scales) @ (weights[0] * found.scales).T
    np.testing.assert_allclose(moved, inputs @ weights[0].T, rtol=1e-3, atol=1e-3)


def test_query_heads_of_a_kv_head_share_their_scales():
    weights, inputs = world()
    found = search_scales(weights, inputs, INT8_INPUTS, tied=3, head_dim=16)
    heads = found.scales.reshape(2, 3, 16)  # 2 KV heads
    assert found.alpha > 0
    np.testing.assert_array_equal(heads[:, 0], heads[:, 1])
    np.testing.assert_array_equal(heads[:, 0], heads[:, 2])
    assert (heads[0, 0] != heads[1, 0]).any()


@pytest.mark.parametrize("kept", [INT4, INT8_INPUTS], ids=lambda kept: kept.name)
def test_mute_channels_and_mute_inputs_have_finite_scales(kept: WeightFormat):
    weights, inputs = world()
    inputs[:, 10:20] = 0
    weights[0][:, 30] = weights[1][:, 30] = 0
    found = search_scales(weights, inputs, kept)
    assert np.isfinite(found.scales).all()
    assert (found.scales > 0).all()
    mute = search_scales(weights, inputs * 0, kept)
    assert (mute.alpha, mute.error) == (0, 0)


def test_what_does_not_fit_is_refused():
    weights, inputs = world()
    for head_dim in (None, 20):
        with pytest.raises(ValueError, match="head_dim with 3 tied heads"):
            search_scales(weights, inputs, INT4, tied=3, head_dim=head_dim)
    with pytest.raises(ValueError, match="finite"):
        search_scales(weights, inputs * np.nan, INT4)
    for bad in (inputs[:0], inputs[:, :4]):
        with pytest.raises(ValueError, match="inputs of 96 channels"):
            search_scales(weights, bad, INT4)
