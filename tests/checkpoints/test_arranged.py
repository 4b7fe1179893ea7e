"""Fused products cut, experts joined: the same numbers as cutting and joining in memory."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints.arranged import ArrangedSource, Cut, Joined
from checkpoints.errors import CheckpointError
from checkpoints.layout import arranged
from tests.held_tensors import Held

SLICES = (None, (slice(1, 4),), (slice(2, 2),), (slice(0, 3), slice(1, 2)))


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("slices", SLICES)
def test_a_part_reads_as_in_memory(slices):
    w, s = numbers(7, 3), numbers(4, 7)
    source = ArrangedSource(
        Held({"a.weight": w, "b.weight": w + 1, "a.scale": s, "b.scale": s + 1, "rest": w}),
        {
            "cut.weight": Cut("a.weight", 2, 6),
            "cut.scale": Cut("a.scale", 1, 6),
            "both.weight": Joined(("b.weight", "a.weight")),
            "both.scale": Joined(("b.scale", "a.scale")),
        },
        file="f",
    )
    expected = {
        "rest": w,
        "cut.weight": w[2:6],
        "cut.scale": s[:, 1:6],
        "both.weight": np.concatenate([w + 1, w]),
        "both.scale": np.concatenate([s + 1, s], axis=1),
    }
    assert sorted(source.names()) == sorted(expected)
    for name, array in expected.items():
        assert source.info(name).shape == array.shape
        assert source.info(name).nbytes == array.nbytes
        found = source.read(name, slices)
        np.testing.assert_array_equal(found, array if slices is None else array[slices])


@pytest.mark.parametrize("step", [1, 2, -1, -2])
def test_a_cut_may_be_read_in_steps(step: int):
    w = numbers(7, 3)
    source = ArrangedSource(Held({"a": w}), {"cut": Cut("a", 0, 5)}, file="f")
    np.testing.assert_array_equal(source.read("cut", (slice(None, None, step),)), w[:5][::step])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"x": Cut("a", 0, 8)}, r"'a' is float32 \(7, 3\), expected at least 8 outputs"),
        ({"x": Joined(("a", "c"))}, r"'c' is float64 \(7, 3\), expected float32"),
        ({"x": Joined(("a", "d"))}, r"'d' is float32 \(7, 2\), expected float32 and the other"),
        ({"x.scale": Cut("e", 0, 1)}, r"'e' is float32 \(3,\), expected at least 2 axes"),
        ({"x": Cut("nothing", 0, 1)}, "nothing"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message: str):
    held = {
        "a": numbers(7, 3),
        "c": numbers(7, 3).astype(np.float64),
        "d": numbers(7, 2),
        "e": numbers(3),
    }
    with pytest.raises(CheckpointError, match=message):
        ArrangedSource(Held(held), parts, file="f")


PHI3 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 12,
    "intermediate_size": 5,
}


def test_fused_products_are_cut():
    qkv, both = numbers(24, 12), numbers(10, 12)
    layer = "model.layers.3."
    source = arranged(
        Held(
            {
                f"{layer}self_attn.qkv_proj.weight": qkv,
                f"{layer}mlp.gate_up_proj.weight": both,
                f"{layer}self_attn.o_proj.weight": qkv[:12],
            }
        ),
        PHI3,
        "f",
    )
    found = {name.removeprefix(layer): source.read(name) for name in source.names()}
    expected = {
        "self_attn.o_proj.weight": qkv[:12],
        "self_attn.q_proj.weight": qkv[:12],
        "self_attn.k_proj.weight": qkv[12:18],
        "self_attn.v_proj.weight": qkv[18:],
        "mlp.gate_proj.weight": both[:5],
        "mlp.up_proj.weight": both[5:],
    }
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_source_with_our_names_stays_itself():
    held = Held({"model.layers.0.self_attn.q_proj.weight": numbers(4, 4)})
    assert arranged(held, PHI3, "f") is held


@pytest.mark.parametrize("key", PHI3)
@pytest.mark.parametrize("value", ["8", -1, True, {}])
def test_a_bad_config_is_left_to_the_model(key: str, value):
    held = Held({"model.layers.0.self_attn.qkv_proj.weight": numbers(24, 12)})
    assert arranged(held, PHI3 | {key: value}, "f") is held


def one_by_one(prefix: str, products: dict[str, str], count: int = 3) -> dict[str, np.ndarray]:
    return {
        f"{prefix}.experts.{i}.{product}.weight": numbers(2, 4) + 100 * i + 10 * len(ours)
        for i in reversed(range(count))
        for product, ours in products.items()
    }


@pytest.mark.parametrize(
    ("place", "products"),
    [
        ("mlp", {name: name for name in ("gate_proj", "up_proj", "down_proj")}),
        ("block_sparse_moe", {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}),
    ],
)
def test_experts_are_laid_one_under_the_other(place: str, products: dict[str, str]):
    layer, router = "model.layers.1.", numbers(3, 4)
    tensors = one_by_one(f"{layer}{place}", products)
    source = arranged(Held(tensors | {f"{layer}{place}.gate.weight": router}), {}, "f")
    expected = {
        f"{layer}mlp.experts.{ours}.weight": np.concatenate(
            [tensors[f"{layer}{place}.experts.{i}.{own}.weight"] for i in range(3)]
        )
        for own, ours in products.items()
    } | {f"{layer}mlp.gate.weight": router}
    assert sorted(source.names()) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(source.read(name), array)
        np.testing.assert_array_equal(source.read(name, (slice(1, 3),)), array[1:3])


@pytest.mark.parametrize("missing", [0, 1])
def test_where_an_expert_lacks_a_part_the_others_stay_as_they_are(missing: int):
    tensors = one_by_one("model.layers.1.mlp", {"up_proj": "up_proj"})
    del tensors[f"model.layers.1.mlp.experts.{missing}.up_proj.weight"]
    assert sorted(arranged(Held(tensors), {}, "f").names()) == sorted(tensors)
