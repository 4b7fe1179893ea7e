"""Quantized weights: values by hand, and what a file holds of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor, pack_int4, spread, unpack_int4
from checkpoints.rounding import levels, round_to_nearest

FORMATS = [
    WeightFormat(bits, size, zero)
    for bits, size, zero in product((8, 4), (None, 32, 64), (False, True))
]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_value_is_its_integer_less_the_zero_point_times_the_scale():
    kept = WeightFormat(4, 32, has_zero=True)
    q = np.zeros((2, 34), np.int8)
    q[0, 0], q[0, 33], q[1, 33] = 15, 3, 4
    scale = np.array([[0.5, 1], [2, 10]], np.float32)  # [G, N]
    zero = np.array([[1, 0], [2, 4]], np.int8)
    value = QTensor(q, scale, zero, kept).dequantized()
    assert value[0, 0] == (15 - 1) * 0.5
    assert value[0, 33] == (3 - 2) * 2
    assert value[1, 33] == 0
    assert value[1, 32] == (0 - 4) * 10
    assert value.dtype == np.float32


def test_a_group_s_value_stands_at_each_of_its_inputs():
    per_group = np.array([[1, 2], [3, 4]])
    assert spread(per_group, WeightFormat(8, 32), 33).tolist() == [
        [1] * 32 + [3],
        [2] * 32 + [4],
    ]
    assert spread(per_group[:1], WeightFormat(8), 3).tolist() == [[1, 1, 1], [2, 2, 2]]


def test_two_integers_lie_in_a_byte_half_a_group_apart():
    q = np.arange(32, dtype=np.int8)[None] % 7
    packed = pack_int4(q, 32)
    assert packed.shape == (1, 16)
    assert packed[0, 3] == 3 | ((19 % 7) << 4)
    negative = pack_int4(np.array([[-1, -7]], np.int8), None)
    assert negative.view(np.uint8).tolist() == [[0x9F]]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_inputs=st.integers(1, 200),
    group_size=st.sampled_from([None, 32, 64, 128]),
    is_signed=st.booleans(),
)
def test_unpacking_undoes_packing(
    seed: int, num_inputs: int, group_size: int | None, is_signed: bool
):
    low, high = levels(WeightFormat(4, has_zero=not is_signed))
    q = np.random.default_rng(seed).integers(low, high + 1, (3, num_inputs), np.int8)
    packed = pack_int4(q, group_size)
    assert packed.dtype == np.int8
    np.testing.assert_array_equal(
        unpack_int4(packed, group_size, num_inputs, is_signed=is_signed), q
    )


@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
@pytest.mark.parametrize("num_inputs", [64, 75])
def test_the_parts_of_a_file_make_it_again(kept: WeightFormat, num_inputs: int):
    quantized = round_to_nearest(normal(5, num_inputs), kept)
    parts = quantized.parts()
    assert set(parts) == {"q", "scale"} | ({"zero"} if kept.has_zero else set())
    assert quantized.nbytes == sum(part.nbytes for part in parts.values())
    again = QTensor.from_parts(parts, kept, num_inputs)
    np.testing.assert_array_equal(again.q, quantized.q)
    np.testing.assert_array_equal(again.dequantized(), quantized.dequantized())


def test_four_bits_are_half_a_byte():
    quantized = round_to_nearest(normal(8, 128), WeightFormat(4, 64))
    assert quantized.nbytes == 8 * 128 // 2 + 4 * 8 * 2
    assert round_to_nearest(normal(8, 128), WeightFormat(8)).nbytes == 8 * 128 + 4 * 8
