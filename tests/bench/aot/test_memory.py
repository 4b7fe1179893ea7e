"""Sums that can be done by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from bench.aot.memory import WEIGHTS, WeightKind, kv_bytes_per_token, rooms, weights_bytes

SHAPES: dict[str, Any] = {
    "norm": {"weight": jax.ShapeDtypeStruct((100,), np.float16)},
    "embed_tokens": {"weight": jax.ShapeDtypeStruct((10, 100), np.float16)},
    "layers": [
        {
            "norm": jax.ShapeDtypeStruct((100,), np.float16),
            "product": jax.ShapeDtypeStruct((64, 128), np.float16),
        }
    ]
    * 2,
}
CONFIG: Any = SimpleNamespace(kv_elements_per_token=2 * 4 * 8 * 64, head_dim=64)


def test_only_the_layers_products_are_quantized():
    whole, products = 2 * (100 + 1000 + 2 * 100), 2 * 64 * 128
    sizes = {kind.name: weights_bytes(SHAPES, kind) - whole for kind in WEIGHTS}
    scales = products // 128 * 4
    assert sizes == {
        "bf16": 2 * products,
        "int8": products + scales,
        "int4": products // 2 + scales,
    }


def test_int8_keys_and_values_bring_a_scale_per_head():
    assert kv_bytes_per_token(CONFIG, is_int8=False) == 2 * 4096
    assert kv_bytes_per_token(CONFIG, is_int8=True) == 4096 + 64 * 4


def test_what_weights_and_programs_do_not_take_is_for_keys_and_values():
    room = next(iter(rooms(CONFIG, SHAPES, 1000, {"1 MB": 1_000_000})))
    assert (room.card, room.weights) == ("1 MB", "bf16")
    assert room.kv_bytes == 900_000 - room.weights_bytes - 1000
    assert room.tokens_bf16 == room.kv_bytes // 8192


def test_a_model_that_does_not_fit_leaves_nothing():
    none = list(rooms(CONFIG, SHAPES, 1000, {"little": 100}))
    assert [room.weights for room in none] == [kind.name for kind in WEIGHTS]
    assert all((room.kv_bytes, room.tokens_bf16, room.tokens_int8) == (0, 0, 0) for room in none)


@pytest.mark.parametrize(("bits", "expected"), [(8, 1024 + 64), (4, 512 + 64)])
def test_a_group_shares_a_scale_of_four_bytes(bits: int, expected: int):
    assert WeightKind("k", bits, 64).nbytes(1024) == expected
