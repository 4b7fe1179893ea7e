"""Rotary positions against their formulas, in every spelling of config.json."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import model_config
from jaxinfer.models.rope import (
    apply_rope,
    attention_factor,
    inverse_frequencies,
    rope_tables,
)
from tests.tiny import tiny_config


def frequencies(**changes: Any) -> np.ndarray:
    return inverse_frequencies(model_config(tiny_config(**changes)))


def plain(head_dim: int, theta: float) -> np.ndarray:
    return np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [2, 16, 80, 128])
def test_default_frequencies_fall_geometrically(head_dim: int, theta: float):
    got = frequencies(head_dim=head_dim, rope_theta=theta)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, plain(head_dim, theta), rtol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {},
        {"rope_type": "default"},
        {"type": "default"},
        {"rope_type": "default", "factor": 4.0},
    ],
)
def test_default_scaling_changes_nothing(scaling: Any):
    np.testing.assert_array_equal(frequencies(rope_scaling=scaling), frequencies())


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("factor", [2.0, 4, 8.0])
def test_linear_scaling_divides_every_frequency(key: str, factor: float):
    got = frequencies(rope_scaling={key: "linear", "factor": factor})
    np.testing.assert_allclose(got, plain(16, 1e4) / factor, rtol=1e-6)


def llama3_one(frequency: float, factor: float, low: float, high: float, context: int) -> float:
    """The published code of Llama 3.1, for one frequency."""
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_stretches_long_wavelengths(factor: float, key: str, form: str):
    scaling = {
        key: "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_config(head_dim=128, **{form: scaling})
    del config["rope_theta"]
    config["rope_parameters" if form == "rope_parameters" else "rope_theta"] = (
        scaling | {"rope_theta": 500000.0} if form == "rope_parameters" else 500000.0
    )
    got = inverse_frequencies(model_config(config))
    base = plain(128, 500000.0)
    want = [llama3_one(f, factor, 1.0, 4.0, 8192) for f in base]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    ratio = base / got
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(factor)
    assert ((ratio > 1.01) & (ratio < factor * 0.99)).any()  # the blended band


def test_llama3_scaling_reads_all_its_keys():
    given = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}
    given |= {"low_freq_factor": 0.5, "high_freq_factor": 2.0}
    want = [llama3_one(f, 4.0, 0.5, 2.0, 64) for f in plain(16, 1e4)]
    np.testing.assert_allclose(frequencies(rope_scaling=given), want, rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
@pytest.mark.parametrize("factor", [{}, {"factor": None}, {"factor": "much"}])
def test_scaling_without_a_number_for_its_factor_is_refused(kind: str, factor: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"rope scaling of type '{kind}' needs numbers"):
        frequencies(rope_scaling={"rope_type": kind, **factor})


def test_pairs_are_turned_by_position_times_frequency():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 2, 50, 511, 100, 3], np.int32)
    speed = frequencies()
    got = apply_rope(jnp.asarray(x), *rope_tables(jnp.asarray(positions), speed))
    pairs = x[..., :8] + 1j * x[..., 8:]
    turned = pairs * np.exp(1j * positions[:, None, None] * speed.astype(np.float64))
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)
    np.testing.assert_array_equal(np.asarray(got)[0], x[0])


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 16)).astype(np.float32)) for _ in range(2))

    def score(q_at: int, k_at: int) -> float:
        q_table, k_table = (rope_tables(jnp.array([at]), frequencies()) for at in (q_at, k_at))
        return float((apply_rope(q, *q_table) * apply_rope(k, *k_table)).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)


def test_rotation_is_in_float32_and_gives_its_inputs_dtype_back():
    x = jnp.ones((2, 1, 16), jnp.bfloat16)
    cos, sin = rope_tables(jnp.array([3, 600]), frequencies())
    got = apply_rope(x, cos, sin)
    assert got.dtype == jnp.bfloat16
    want = apply_rope(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def yarn_one(pair: int, low: float, high: float, factor: float, frequency: float) -> float:
    """The paper's ramp for one pair, between pairs `low` and `high`."""
    share = min(1.0, max(0.0, (pair - low) / (high - low)))
    return frequency * (share / factor + 1 - share)


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_yarn_stretches_the_pairs_that_turn_slowly(key: str, form: str):
    scaling: dict[str, Any] = {key: "yarn", "factor": 4.0}
    scaling["original_max_position_embeddings"] = 4096
    config = model_config(tiny_config(head_dim=128, **{form: scaling}))
    got = inverse_frequencies(config)
    # turns of pair i in 4,096 tokens: 4096 / (2 pi 10000**(i / 64)): 32 at 20.9, 1 at 45.03
    want = [yarn_one(i, 20, 46, 4.0, f) for i, f in enumerate(plain(128, 1e4))]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert attention_factor(config) == pytest.approx(0.1 * math.log(4) + 1)
    assert config.max_position_embeddings == 4 * 4096


def test_yarns_band_need_not_end_at_whole_pairs():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    got = frequencies(head_dim=128, rope_scaling=scaling | {"truncate": False})
    low, high = (64 * math.log(4096 / (2 * math.pi * turns)) / math.log(1e4) for turns in (32, 1))
    want = [yarn_one(i, low, high, 4.0, f) for i, f in enumerate(plain(128, 1e4))]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("says", "factor"),
    [
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.5, "mscale_all_dim": 1.0},
            (0.05 * math.log(8) + 1) / (0.1 * math.log(8) + 1),
        ),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarns_cosines_are_multiplied_as_the_file_says(says: dict[str, float], factor: float):
    config = model_config(tiny_config(rope_scaling={"rope_type": "yarn", "factor": 8.0} | says))
    assert attention_factor(config) == pytest.approx(factor)
    cos, sin = rope_tables(jnp.array([3]), inverse_frequencies(config), attention_factor(config))
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


@pytest.mark.parametrize("says", [{"beta_fast": -1}, {"attention_factor": 0}])
def test_yarn_with_numbers_that_cannot_be_is_refused(says: dict[str, float]):
    with pytest.raises(ConfigError, match="needs positive numbers of original positions"):
        frequencies(rope_scaling={"rope_type": "yarn", "factor": 2.0} | says)
