"""Round-to-nearest: every group within half a step, whatever is in it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from checkpoints import rounding
from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor, spread
from checkpoints.rounding import LEAST_SCALE, levels, round_to_nearest

FORMATS = [
    WeightFormat(bits, size, zero)
    for bits, size, zero in product((8, 4), (None, 32, 64, 128), (False, True))
]
WEIGHTS = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=70),
    elements=st.one_of(
        st.just(0.0),
        st.floats(-1, 1, width=32),
        st.floats(-1e4, 1e4, width=32),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
)


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def error_of(quantized: QTensor, weight: np.ndarray, importance: np.ndarray | None = None) -> float:
    off = np.square(quantized.dequantized().astype(np.float64) - weight)
    return float((off if importance is None else off * importance).sum())


def test_the_largest_weight_is_the_largest_integer():
    quantized = round_to_nearest(row(7, -3.4, 0.6, 0), WeightFormat(4), search_clip=False)
    assert quantized.scale.tolist() == [[1.0]]
    assert quantized.q.tolist() == [[7, -3, 1, 0]]
    assert round_to_nearest(row(-127, 63.6), WeightFormat(8)).q.tolist() == [[-127, 64]]


def test_a_zero_point_uses_the_integers_of_both_sides():
    kept = WeightFormat(4, has_zero=True)
    quantized = round_to_nearest(row(-5, 10, 0, 1.2), kept, search_clip=False)
    assert quantized.zero is not None
    assert (quantized.scale.tolist(), quantized.zero.tolist()) == ([[1.0]], [[5]])
    assert quantized.q.tolist() == [[0, 15, 5, 6]]
    eight = round_to_nearest(row(0, 255), WeightFormat(8, has_zero=True))
    assert (eight.q.tolist(), eight.scale.tolist()) == ([[-128, 127]], [[1.0]])


@settings(max_examples=40, deadline=None)
@given(weight=WEIGHTS, kept=st.sampled_from(FORMATS), search_clip=st.booleans())
def test_any_weights_are_within_their_group_and_zeros_stay_zeros(
    weight: np.ndarray, kept: WeightFormat, search_clip: bool
):
    quantized = round_to_nearest(weight, kept, search_clip=search_clip)
    low, high = levels(kept)
    assert (quantized.q >= low).all()
    assert (quantized.q <= high).all()
    assert np.isfinite(quantized.scale).all()
    assert ((quantized.scale == 0) | (quantized.scale >= LEAST_SCALE)).all()
    with np.errstate(over="ignore"):  # half a step beyond the largest float
        meant = quantized.dequantized()
    assert (meant[weight == 0] == 0).all()
    if not search_clip:
        steps = spread(quantized.scale, kept, weight.shape[1]).astype(np.float64)
        reach = high * LEAST_SCALE if not kept.has_zero else (high - low) * LEAST_SCALE
        off = np.abs(np.clip(meant, -3.4e38, 3.4e38).astype(np.float64) - weight)
        # A zero point is rounded too: the group's ends may be half a step outside.
        assert (off <= steps * (1.01 if kept.has_zero else 0.5001) + reach).all()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kept=st.sampled_from([kept for kept in FORMATS if kept.bits == 4]),
    outlier=st.sampled_from([1.0, 10.0, 1e4]),
    is_weighted=st.booleans(),
)
def test_a_searched_scale_never_costs_more_than_the_full_range(
    seed: int, kept: WeightFormat, outlier: float, is_weighted: bool
):
    weight = normal(3, 150, seed=seed)
    weight[0, 7] *= outlier
    importance = np.abs(normal(150, seed=seed + 1)) + 0.1 if is_weighted else None
    found = round_to_nearest(weight, kept, importance=importance)
    plain = round_to_nearest(weight, kept, search_clip=False)
    before, after = error_of(plain, weight, importance), error_of(found, weight, importance)
    assert after <= before * (1 + 1e-5)


def test_the_search_pays_with_4_bits_and_is_not_done_with_8():
    weight = normal(64, 512)
    for kept in FORMATS:
        plain = error_of(round_to_nearest(weight, kept, search_clip=False), weight)
        found = error_of(round_to_nearest(weight, kept), weight)
        assert found == plain if kept.bits == 8 else found < 0.96 * plain, kept.name


def test_an_input_of_no_importance_does_not_widen_the_steps():
    weight = np.full((1, 32), 0.1, np.float32) * np.arange(1, 33) / 32
    weight[0, 5] = 1
    importance = np.ones(32)
    importance[5] = 0
    kept = WeightFormat(4, 32)
    told = round_to_nearest(weight, kept, importance=importance)
    untold = round_to_nearest(weight, kept)
    assert told.scale[0, 0] < untold.scale[0, 0]
    assert error_of(told, weight, importance) < error_of(untold, weight, importance)
    nothing = round_to_nearest(weight, kept, importance=np.zeros(32))
    assert nothing.q.tolist() == untold.q.tolist()


@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
def test_odd_groups_are_kept_within_half_a_step(kept: WeightFormat):
    weight = normal(6, 256) * 0.05
    weight[0] = 0
    weight[1, :128] = 0
    weight[2] *= 1e-7
    weight[3, 40] = 1e4
    weight[4] = 1e-40  # subnormal
    weight[5] = -0.25
    quantized = round_to_nearest(weight, kept, search_clip=False)
    meant = quantized.dequantized()
    assert np.isfinite(meant).all()
    assert (meant[0] == 0).all()
    assert (meant[1, :128] == 0).all()
    assert (meant[4] == 0).all()
    np.testing.assert_allclose(meant[5], weight[5], rtol=1e-6)
    steps = spread(quantized.scale, kept, 256)
    assert (np.abs(meant - weight)[:4] <= (1.01 if kept.has_zero else 0.5001) * steps[:4]).all()
    assert (steps[2] > 0).all()
    searched = round_to_nearest(weight, kept).dequantized()
    assert np.isfinite(searched).all()
    np.testing.assert_allclose(searched[5], weight[5], rtol=1e-6)
    np.testing.assert_allclose(searched[3, 40], 1e4, rtol=0.04)
    assert (searched[[0, 4]] == 0).all()


@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
def test_the_largest_floats_have_finite_scales(kept: WeightFormat):
    weight = row(3.4e38, -3.4e38, 1e38, 0)
    scale = round_to_nearest(weight, kept).scale
    assert np.isfinite(scale).all()
    assert (scale > 0).all()


@pytest.mark.parametrize(
    "kept", [kept for kept in FORMATS if kept.group_size], ids=lambda kept: kept.name
)
def test_a_shorter_last_group_is_rounded_as_if_alone(kept: WeightFormat):
    assert kept.group_size is not None
    weight = normal(5, kept.group_size + 20)
    whole = round_to_nearest(weight, kept)
    tail = round_to_nearest(weight[:, kept.group_size :], kept)
    np.testing.assert_array_equal(whole.q[:, kept.group_size :], tail.q)
    np.testing.assert_array_equal(whole.scale[1], tail.scale[0])
    assert whole.scale.shape == (2, 5)


@pytest.mark.parametrize("kept", [WeightFormat(4, 32, True), WeightFormat(8)])
def test_pieces_make_no_difference(kept: WeightFormat, monkeypatch: pytest.MonkeyPatch):
    weight, importance = normal(9, 100), np.arange(100) + 1.0
    whole = round_to_nearest(weight, kept, importance=importance)
    monkeypatch.setattr(rounding, "PIECE", 200)
    parts = round_to_nearest(weight, kept, importance=importance)
    np.testing.assert_array_equal(whole.q, parts.q)
    np.testing.assert_array_equal(whole.scale, parts.scale)
    assert kept.has_zero is (parts.zero is not None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(ValueError, match="finite"):
        round_to_nearest(row(1, bad), WeightFormat(4, 32))


def test_weights_of_other_float_types_are_taken():
    weight = normal(2, 40).astype(np.float16)
    np.testing.assert_array_equal(
        round_to_nearest(weight, WeightFormat(4, 32)).q,
        round_to_nearest(weight.astype(np.float32), WeightFormat(4, 32)).q,
    )
