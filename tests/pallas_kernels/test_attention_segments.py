"""Segments cover every position once, and few of them make a long row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_segments import SEGMENT, most_segments, segment_of, segment_start

NUMBER = 192  # the last of these begins past 8 Mi tokens

starts = np.asarray(jax.jit(segment_start)(jnp.arange(NUMBER, dtype=jnp.int32)))


def test_segments_begin_at_0_and_follow_one_another():
    assert starts[0] == 0
    assert (np.diff(starts) >= SEGMENT).all()
    assert (np.diff(starts, 2) >= 0).all(), "a later segment is never shorter"
    assert (starts % SEGMENT == 0).all()


def test_a_position_lies_in_the_segment_that_begins_before_it():
    ends = starts[1:] - 1
    positions = np.concatenate([starts, ends, (starts[:-1] + ends) // 2])
    want = np.searchsorted(starts, positions, side="right") - 1
    np.testing.assert_array_equal(jax.jit(segment_of)(positions), want)


def test_no_position_lies_in_no_segment():
    assert segment_of(jnp.int32(-1)) == -1


@pytest.mark.parametrize(
    ("tokens", "segments"),
    [(1, 1), (512, 1), (513, 2), (16384, 32), (32768, 48), (131072, 80), (2**20, 128)],
)
def test_segments_of_a_row(tokens: int, segments: int):
    assert most_segments(tokens, None) == segments


@pytest.mark.parametrize("window", [1, 2, 511, 512, 513, 514, 4096])
def test_no_query_needs_more_segments_than_are_kept_for_it(window: int):
    positions = np.concatenate([np.arange(6000), np.arange(16000, 19000)]).astype(np.int32)
    first = segment_of(jnp.asarray(np.maximum(positions - (window - 1), 0)))
    counts = segment_of(jnp.asarray(positions)) - first + 1
    assert counts.max() <= most_segments(19000, window)
    assert counts.max() == most_segments(6000, window)
