"""A product is rounded by the method asked for; auto by what holds on unseen inputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from checkpoints.formats import WeightFormat
from checkpoints.gptq import gptq
from checkpoints.rounding import round_to_nearest
from jaxinfer.quantization.layer_inputs import SiteInputs
from jaxinfer.quantization.methods import relative_error, rounded

Floats = npt.NDArray[np.float32]
KEPT = WeightFormat(4)
WEIGHT = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)


def inputs_of(seen: Floats, held: Floats) -> SiteInputs:
    largest = np.abs(seen).max(axis=0)
    return SiteInputs(hessian_of(seen), hessian_of(held), 0.125, largest, largest, seen)


def hessian_of(x: Floats) -> Floats:
    return x.T @ x / np.float32(len(x))


def related(num: int, seed: int) -> Floats:
    """Inputs whose channels go together, so that one can make up for another."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(num, 3)) @ np.random.default_rng(7).normal(size=(3, 16))
    return (shared + 0.1 * rng.normal(size=(num, 16))).astype(np.float32)


def test_the_relative_error_is_that_of_the_outputs():
    x = related(500, 1)
    made = round_to_nearest(WEIGHT, KEPT)
    outputs, off = x @ WEIGHT.T, x @ (made.dequantized() - WEIGHT).T
    wanted = np.sqrt(np.square(off).mean() / np.square(outputs).mean())
    assert relative_error(WEIGHT, made, hessian_of(x)) == pytest.approx(wanted, rel=1e-3)
    assert relative_error(0 * WEIGHT, round_to_nearest(0 * WEIGHT, KEPT), hessian_of(x)) == 0


def test_auto_takes_gptq_where_it_holds_on_unseen_inputs():
    inputs = inputs_of(related(500, 1), related(500, 2))
    found = rounded(WEIGHT, inputs, KEPT, "auto", seed=0)
    np.testing.assert_array_equal(found.q, gptq(WEIGHT, inputs.all_hessian, KEPT).q)
    nearest = round_to_nearest(WEIGHT, KEPT)
    errors = [relative_error(WEIGHT, q, inputs.held_hessian) for q in (found, nearest)]
    assert errors[0] < errors[1] / 2


def test_auto_takes_the_nearest_where_unseen_inputs_are_others():
    held = np.random.default_rng(3).normal(size=(500, 16)).astype(np.float32)
    inputs = inputs_of(related(4, 1), held)
    found = rounded(WEIGHT, inputs, KEPT, "auto", seed=0)
    importance = np.diagonal(inputs.all_hessian)
    nearest = round_to_nearest(WEIGHT, KEPT, importance=importance)
    np.testing.assert_array_equal(found.q, nearest.q)


def test_nearest_looks_at_no_inputs():
    inputs = inputs_of(related(50, 1), related(50, 2))
    found = rounded(WEIGHT, inputs, KEPT, "nearest", seed=0)
    np.testing.assert_array_equal(found.q, round_to_nearest(WEIGHT, KEPT).q)
