"""Keys are scaled so that rounding them per token costs the scores less."""

from __future__ import annotations

import numpy as np

from jaxinfer.quantization.key_scales import key_scales


def world(loud: float) -> tuple[np.ndarray, np.ndarray]:
    """4 query heads and 2 KV heads of 8 channels; channels 1 and 5 (a pair) of head 0 are loud."""
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(200, 4, 8)).astype(np.float32)
    keys = rng.normal(size=(200, 2, 8)).astype(np.float32)
    keys[:, 0, [1, 5]] *= loud
    return queries, keys


def score_error(queries: np.ndarray, keys: np.ndarray, scales: np.ndarray) -> float:
    small, large = keys / scales, queries * np.repeat(scales, 2, axis=0)
    step = np.abs(small).max(axis=2, keepdims=True) / 127
    off = np.repeat(np.rint(small / step) * step - small, 2, axis=1)
    return float(np.square(np.einsum("thd,uhd->htu", large, off)).mean())


def test_pairs_that_rotation_mixes_share_a_scale_of_mean_one():
    scales = key_scales(*world(30), rotary_dim=8)
    assert scales.shape == (2, 8)
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(scales[:, :4], scales[:, 4:])
    np.testing.assert_allclose(np.log(scales).sum(axis=1), 0, atol=1e-5)


def test_channels_that_do_not_turn_have_scales_of_their_own():
    """Of 8 channels 4 turn: 1 and 3 are a pair, 5 is alone."""
    queries, keys = world(30)
    scales = key_scales(queries, keys, rotary_dim=4)
    np.testing.assert_array_equal(scales[:, :2], scales[:, 2:4])
    assert len({*scales[0, 2:]}) == 6
    assert score_error(queries, keys, scales) < score_error(queries, keys, np.ones((2, 8))) / 2


def test_a_loud_pair_is_divided_and_the_scores_gain():
    queries, keys = world(30)
    scales = key_scales(queries, keys, rotary_dim=8)
    assert scales[0, 1] == scales[0].max() > 2
    assert score_error(queries, keys, scales) < score_error(queries, keys, np.ones((2, 8))) / 2


def test_a_head_of_zeros_stays_as_it_is():
    queries, keys = world(30)
    keys[:, 1] = 0
    np.testing.assert_array_equal(key_scales(queries, keys, rotary_dim=8)[1], 1)
