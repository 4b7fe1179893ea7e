"""GPTQ: errors make up for each other, as in the paper's form of it."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints import gptq as module
from checkpoints.formats import WeightFormat
from checkpoints.gptq import gptq
from checkpoints.qtensor import QTensor, spread
from checkpoints.rounding import levels, round_to_nearest, scales_of

FORMATS = [
    WeightFormat(4, 32),
    WeightFormat(4, 64, True),
    WeightFormat(4),
    WeightFormat(8, 128, True),
    WeightFormat(8),
]
INPUTS = 150  # no multiple of any group


def world(num_tokens: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight and the hessian of inputs that go together, some louder than others."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((num_tokens, 30)) @ rng.standard_normal((30, INPUTS))
    loud = np.exp(rng.standard_normal(INPUTS))
    inputs = (mixed + rng.standard_normal((num_tokens, INPUTS))) * loud
    weight = rng.standard_normal((24, INPUTS)).astype(np.float32)
    return weight, (inputs.T @ inputs / num_tokens).astype(np.float32)


def output_error(quantized: QTensor, weight: np.ndarray, hessian: np.ndarray) -> float:
    off = quantized.dequantized().astype(np.float64) - weight
    return float((off @ hessian * off).sum())


def textbook(
    weight: np.ndarray, hessian: np.ndarray, kept: WeightFormat, damping: float, order: np.ndarray
) -> np.ndarray:
    """Integers by the paper's algorithm 1: the inverse of H, its upper factor, one column at a
    time; float64."""
    scale, zero = scales_of(weight, kept, importance=np.diagonal(hessian))
    steps = spread(scale, kept, INPUTS)[:, order].astype(np.float64)
    zeros = np.zeros_like(steps)
    if zero is not None:
        zeros += spread(zero, kept, INPUTS)[:, order]
    h = hessian.astype(np.float64)[np.ix_(order, order)]
    h += np.eye(INPUTS) * damping * np.diagonal(h).mean()
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    left, q = weight[:, order].astype(np.float64), np.zeros(weight.shape, np.int8)
    for k in range(INPUTS):
        q[:, order[k]] = np.clip(np.rint(left[:, k] / steps[:, k]) + zeros[:, k], *levels(kept))
        meant = (q[:, order[k]] - zeros[:, k]) * steps[:, k]
        left[:, k:] -= np.outer((left[:, k] - meant) / upper[k, k], upper[k, k:])
    return q


@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
@pytest.mark.parametrize("act_order", [True, False])
def test_it_is_the_algorithm_of_the_paper(kept: WeightFormat, act_order: bool):
    weight, hessian = world()
    order = np.arange(INPUTS)
    if act_order:
        order = np.argsort(np.diagonal(hessian), kind="stable")[::-1]
    want = textbook(weight, hessian, kept, 0.01, order)
    found = gptq(weight, hessian, kept, act_order=act_order, damping=0.01)
    # A tie that float32 decides otherwise is made up for by later inputs, so a few may differ.
    assert (found.q == want).mean() > 0.99


@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
def test_the_output_error_is_far_below_that_of_the_nearest(kept: WeightFormat):
    weight, hessian = world()
    nearest = round_to_nearest(weight, kept, importance=np.diagonal(hessian))
    found = gptq(weight, hessian, kept)
    assert output_error(found, weight, hessian) < 0.4 * output_error(nearest, weight, hessian)
    assert (found.zero is not None) is kept.has_zero
    assert found.scale.shape == nearest.scale.shape


def test_two_inputs_that_are_always_equal_share_an_error():
    hessian = np.array([[1, 0, 0], [0, 1, 1], [0, 1, 1]], np.float32)
    weight = np.array([[127, 0.4, 0.4], [127, -0.4, 0.2]], np.float32)  # a step is 1
    found = gptq(weight, hessian, WeightFormat(8))
    assert found.q[:, 0].tolist() == [127, 127]
    assert found.q[:, 1:].sum(axis=1).tolist() == [1, 0]
    assert round_to_nearest(weight, WeightFormat(8)).q[0].tolist() == [127, 0, 0]


@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
def test_inputs_that_never_meet_are_rounded_to_the_nearest(kept: WeightFormat):
    weight, hessian = world()
    power = np.diagonal(hessian)
    want = round_to_nearest(weight, kept, importance=power)
    found = gptq(weight, np.diag(power), kept)
    assert (found.q == want.q).mean() > 0.999  # but for ties
    unseen = gptq(weight, np.zeros_like(hessian), kept)
    assert (unseen.q == round_to_nearest(weight, kept).q).mean() > 0.999


def test_act_order_helps_where_powers_differ():
    weight, hessian = world()
    kept = WeightFormat(4, 32)
    first, plain = (gptq(weight, hessian, kept, act_order=order) for order in (True, False))
    assert output_error(first, weight, hessian) < output_error(plain, weight, hessian)


def test_an_input_that_is_always_zero_is_rounded_by_itself():
    weight, hessian = world()
    hessian[[5, 70]] = 0
    hessian[:, [5, 70]] = 0
    kept = WeightFormat(4, 32)
    found = gptq(weight, hessian, kept)
    want = round_to_nearest(weight, kept, importance=np.diagonal(hessian))
    np.testing.assert_array_equal(found.q[:, [5, 70]], want.q[:, [5, 70]])
    weight[:, 5] *= 0.5
    other = gptq(weight, hessian, WeightFormat(8))
    mute = np.delete(np.arange(INPUTS), 5)
    same = gptq(np.where(np.arange(INPUTS) == 5, 0, weight), hessian, WeightFormat(8))
    if (other.scale == same.scale).all():
        np.testing.assert_array_equal(other.q[:, mute], same.q[:, mute])


@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_fewer_tokens_than_inputs_are_enough(damping: float):
    weight, hessian = world(num_tokens=20)
    kept = WeightFormat(4, 64)
    found = gptq(weight, hessian, kept, damping=damping)
    nearest = round_to_nearest(weight, kept, importance=np.diagonal(hessian))
    assert output_error(found, weight, hessian) < output_error(nearest, weight, hessian)


def test_damping_is_raised_until_the_matrix_is_definite():
    weight, hessian = world()
    off = hessian - np.eye(INPUTS, dtype=np.float32) * 0.05 * np.diagonal(hessian).mean()
    assert np.linalg.eigvalsh(off).min() < 0
    found = gptq(weight, off, WeightFormat(4, 32))
    nearest = round_to_nearest(weight, WeightFormat(4, 32), importance=np.diagonal(hessian))
    assert output_error(found, weight, hessian) < output_error(nearest, weight, hessian)


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch):
    weight, hessian = world()
    whole = gptq(weight, hessian, WeightFormat(4, 32))
    monkeypatch.setattr(module, "BLOCK", 7)
    parts = gptq(weight, hessian, WeightFormat(4, 32))
    assert (whole.q == parts.q).mean() > 0.99


def test_zero_groups_are_exactly_zero():
    weight, hessian = world()
    weight[3] = 0
    weight[4, 32:64] = 0
    for kept in FORMATS:
        meant = gptq(weight, hessian, kept).dequantized()
        assert np.isfinite(meant).all()
        assert (meant[3] == 0).all()
        assert (meant[4, 32:64] == 0).all() or kept.group_size != 32


def test_what_is_no_hessian_is_refused():
    weight, hessian = world()
    kept = WeightFormat(4, 32)
    with pytest.raises(ValueError, match="150 x 150 inputs"):
        gptq(weight, hessian[:4, :4], kept)
    for bad in (np.where(hessian > 1, np.nan, hessian), -hessian):
        with pytest.raises(ValueError, match=r"finite|real inputs"):
            gptq(weight, bad, kept)
    with pytest.raises(ValueError, match="finite"):
        gptq(np.full_like(weight, np.inf), hessian, kept)
