"""Formats of weights: what is computed, and how config.json says it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.formats import HEAD_FORMAT, Quantization, WeightFormat, quantization_of

INT8 = WeightFormat(8)
MIXED = Quantization(
    WeightFormat(4, 128, True),
    HEAD_FORMAT,
    (("layers.0.mlp.down_proj", INT8), ("layers.1.self_attn.q_proj", None)),
)


@pytest.mark.parametrize(
    ("kept", "name"),
    [
        (INT8, "int8"),
        (WeightFormat(4, 128), "int4-g128"),
        (WeightFormat(4, 32, True), "int4-g32-asym"),
        (WeightFormat(8, activations="int8"), "int8-a8"),
        (WeightFormat(8, activations="int8_static"), "int8-a8s"),
    ],
)
def test_a_format_has_a_short_name(kept: WeightFormat, name: str):
    assert kept.name == name


def test_a_row_has_a_scale_for_each_group_and_one_for_the_rest():
    assert WeightFormat(4, 128).groups(576) == 5
    assert WeightFormat(4, 64).groups(576) == 9
    assert WeightFormat(8).groups(576) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits must be 8 or 4; got 3"),
        ({"group_size": 48}, r"group_size must be one of \(32, 64, 128\).*got 48"),
        ({"activations": "int4"}, "activations must be one of float, int8, int8_static"),
        ({"bits": 4, "activations": "int8"}, "need 8-bit weights"),
        ({"group_size": 32, "activations": "int8"}, "one scale per output"),
        ({"has_zero": True, "activations": "int8_static"}, "no zero points"),
    ],
)
def test_what_no_product_computes_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        WeightFormat(**fields)


def test_exceptions_go_before_the_rest():
    assert MIXED.of("layers.0.mlp.down_proj") == INT8
    assert MIXED.of("layers.1.self_attn.q_proj") is None
    assert MIXED.of("layers.1.mlp.down_proj") == WeightFormat(4, 128, True)


def test_a_part_of_a_model_knows_its_own_exceptions():
    first = MIXED.inside("layers.0")
    assert first.of("mlp.down_proj") == INT8
    assert first.inside("mlp").of("down_proj") == INT8
    assert first == Quantization(MIXED.weights, MIXED.head, (("mlp.down_proj", INT8),))
    assert MIXED.inside("layers.2") == MIXED.inside("layers.3")
    assert MIXED.inside("layers.10").exceptions == ()


@pytest.mark.parametrize("quantization", [MIXED, Quantization(None, None), Quantization(INT8)])
def test_config_json_gives_back_what_it_was_told(quantization: Quantization):
    config = json.loads(json.dumps({"quantization_config": quantization.to_config()}))
    assert quantization_of(config, "config.json") == quantization


def test_a_model_without_it_is_not_quantized():
    assert quantization_of({"hidden_size": 8}, "config.json") is None


@pytest.mark.parametrize("found", [{"quant_method": "gptq", "bits": 4}, {"bits": 4}, "awq"])
def test_another_method_s_checkpoint_is_refused_by_name(found: Any):
    with pytest.raises(CheckpointError, match="expected quantization_config of quant_method"):
        quantization_of({"quantization_config": found}, "config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"bits": 5}},
        {"weights": {"bits": 4, "size": 3}},
        {"weights": [4]},
        {"exceptions": {"layers.0": {"bits": "4"}}},
        {"exceptions": ["layers.0"]},
        {"exceptions": None},
    ],
)
def test_damage_is_refused(change: dict[str, Any]):
    config = {"quantization_config": MIXED.to_config() | change}
    with pytest.raises(CheckpointError, match="expected weights, head and exceptions"):
        quantization_of(config, "config.json")


@pytest.mark.parametrize("missing", ["weights", "head"])
def test_what_is_missing_is_named(missing: str):
    found = MIXED.to_config()
    del found[missing]
    with pytest.raises(CheckpointError, match=missing):
        quantization_of({"quantization_config": found}, "config.json")
