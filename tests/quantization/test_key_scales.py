"""Scales of key channels: what they must be, and that they help where one channel is large."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from jaxinfer.quantization.key_scales import KeyScales, by_channel, find_key_scales

Floats = npt.NDArray[np.float32]
T, K, H, D = 96, 2, 4, 16


def world(*, outlier: float = 1.0, seed: int = 0) -> tuple[Floats, Floats]:
    """Keys whose channel 3 of head 1 is `outlier` times the others, and queries."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(T, K, D)).astype(np.float32)
    keys[:, 1, 3] *= outlier
    return keys, rng.normal(size=(T, H, D)).astype(np.float32)


def test_an_outlier_channel_gets_a_large_scale_that_its_rotary_partner_shares():
    found = find_key_scales(*world(outlier=40))
    assert found.scales.shape == (K, D // 2)
    assert np.argmax(found.scales[1]) == 3
    assert found.scales[1].max() > 4 * np.median(found.scales[1])
    assert found.error < found.error_before / 3
    wide = by_channel(found.scales)
    np.testing.assert_array_equal(wide[:, : D // 2], wide[:, D // 2 :])


def test_scales_change_no_score_but_by_rounding():
    keys, queries = world(outlier=40)
    wide = by_channel(find_key_scales(keys, queries).scales)
    before = np.einsum("thd,thd->th", queries[:, ::2], keys)
    after = np.einsum("thd,thd->th", queries[:, ::2] * wide, keys / wide)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def test_the_result_is_never_worse_than_no_scales():
    for seed in range(4):
        found = find_key_scales(*world(seed=seed))
        assert found.error <= found.error_before
        np.testing.assert_allclose(np.log(found.scales).mean(axis=-1), 0, atol=1e-5)


@pytest.mark.parametrize("silent", ["keys", "queries"])
def test_silent_channels_and_heads_keep_finite_scales(silent: str):
    keys, queries = world(outlier=40)
    keys, queries = keys.copy(), queries.copy()
    if silent == "keys":
        keys[:, 0], keys[:, 1, 5] = 0, 0
    else:
        queries[:, :2], queries[:, 2:, 5] = 0, 0
    found: KeyScales = find_key_scales(keys, queries)
    assert np.isfinite(found.scales).all()
    assert (found.scales > 0).all()


def test_one_token_is_enough():
    keys, queries = world()
    assert np.isfinite(find_key_scales(keys[:1], queries[:1]).scales).all()


def test_what_does_not_fit_is_refused():
    keys, queries = world()
    for bad in ((keys[:3], queries), (keys, queries[:, :3]), (keys[..., :15], queries[..., :15])):
        with pytest.raises(ValueError, match="expected keys"):
            find_key_scales(*bad)
    keys[5, 0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        find_key_scales(keys, queries)
