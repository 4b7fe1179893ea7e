"""Sums that can be done by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bench.aot.memory import CARDS, kv_bytes_per_token, rooms
from bench.aot.targets import TARGETS

CONFIG: Any = SimpleNamespace(kv_elements_per_token=2 * 4 * 8 * 64, head_dim=64)


def test_int8_keys_and_values_bring_a_scale_per_head():
    assert kv_bytes_per_token(CONFIG, is_int8=False) == 2 * 4096
    assert kv_bytes_per_token(CONFIG, is_int8=True) == 4096 + 64 * 4


def test_what_weights_and_programs_do_not_take_is_for_keys_and_values():
    (room,) = rooms(CONFIG, "bf16", 80_000, 1000, {"1 MB": 1_000_000})
    assert (room.card, room.weights) == ("1 MB", "bf16")
    assert room.kv_bytes == 900_000 - 80_000 - 1000
    assert room.tokens_bf16 == 819_000 // 8192
    assert room.tokens_int8 == 819_000 // 4352


def test_a_model_that_does_not_fit_leaves_nothing():
    small, large = rooms(CONFIG, "bf16", 80_000, 1000, {"small": 90_000, "large": 1_000_000})
    assert (small.kv_bytes, small.tokens_bf16, small.tokens_int8) == (0, 0, 0)
    assert large.kv_bytes > 0


def test_every_target_has_cards():
    assert CARDS.keys() == TARGETS.keys()
