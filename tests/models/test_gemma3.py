"""Gemma 3 against an independent decoder in numpy float64, detail by detail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.layers import OffsetRMSNorm
from jaxinfer.models.registry import decoder_for
from tests.models.reference_decoder import reference_decoder
from tests.models.tiny_decoder import GEMMA3, TinyDecoder, load_tiny
from tests.tiny import tiny_config, tiny_tensors

SCALED: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    return load_tiny(tmp_path_factory.mktemp("model"), **GEMMA3)


@pytest.fixture(scope="module")
def logits(gemma3: TinyDecoder) -> np.ndarray:
    return gemma3.dense(gemma3.random_ids(40))


def test_logits_are_those_of_the_reference_decoder(gemma3: TinyDecoder, logits: np.ndarray):
    want = gemma3.reference.logits(gemma3.random_ids(40))
    assert np.ptp(want) > 5  # neither flat nor degenerate
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=2e-4)


def test_global_layers_alone_are_scaled(tmp_path: Path):
    tiny = load_tiny(tmp_path, **GEMMA3, **SCALED)
    ids = tiny.random_ids(40)
    np.testing.assert_allclose(tiny.dense(ids), tiny.reference.logits(ids), rtol=1e-4, atol=2e-4)


def test_token_by_token_is_the_same_as_all_at_once(gemma3: TinyDecoder):
    ids = gemma3.random_ids(12, seed=1)
    want = gemma3.reference.logits(ids)
    np.testing.assert_allclose(gemma3.dense(ids, (9,)), want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 5},
        {"sliding_window": 7},
        {"sliding_window_pattern": 2},
        {"query_pre_attn_scalar": 16},
        {"rope_theta": 1e4},
        {"rope_local_base_freq": 1e4},
        SCALED,
    ],
    ids=str,
)
def test_each_of_them_shows(gemma3: TinyDecoder, logits: np.ndarray, changes: dict[str, Any]):
    """The comparison with the reference can fail: the window to the token."""
    config = tiny_config(**GEMMA3 | changes)
    ids = gemma3.random_ids(40)
    other = reference_decoder(config, tiny_tensors(config)).logits(ids)
    assert np.abs(other - logits).max() > 0.02


def test_a_window_ends_to_the_token(tmp_path: Path):
    """One sliding layer of 4 tokens: what is further back changes nothing."""
    one: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window": 4}
    tiny = load_tiny(tmp_path, **GEMMA3 | one)
    ids = tiny.random_ids(12, seed=3)
    others = [*ids[:5], (ids[5] + 1) % tiny.vocab_size, *ids[6:]]
    rows = (tiny.dense(ids) != tiny.dense(others)).any(axis=1)
    assert np.flatnonzero(rows).tolist() == [5, 6, 7, 8]


def test_a_layer_type_is_a_kind_of_its_own():
    decoder = decoder_for(tiny_config(**GEMMA3), dtype=jnp.dtype("float32"))
    assert decoder.layer_kinds == (0, 0, 1, 0)
    assert decoder.param_shapes["layers"][0].keys() == decoder.param_shapes["layers"][2].keys()


def test_the_embeddings_scale_is_rounded_to_the_models_dtype(tmp_path: Path):
    tiny = load_tiny(tmp_path, dtype="bfloat16", **GEMMA3)
    x, _ = tiny.decoder.bind_top(tiny.params).begin(jnp.arange(8), jnp.arange(8))
    rows = tiny.params["embed_tokens"]["weight"][:8]
    np.testing.assert_array_equal(x, rows * jnp.asarray(48**0.5, jnp.bfloat16))  # 6.9375


def test_bfloat16_follows_float32(tmp_path: Path):
    tiny = load_tiny(tmp_path, dtype="bfloat16", **GEMMA3)
    ids = tiny.random_ids(20)
    got, want = tiny.dense(ids), tiny.reference.logits(ids)
    error = np.sqrt(np.mean((got - want) ** 2)) / want.std()
    assert 1e-4 < error < 0.05


def test_an_offset_norm_adds_one_in_float32():
    """1 + 2**-9 is 1 in bfloat16."""
    norm = OffsetRMSNorm(8, eps=0.0, arithmetic=Arithmetic(jnp.dtype("bfloat16")))
    norm.weight[...] = jnp.full(8, 2.0**-9, jnp.bfloat16)
    x = jnp.full((8, 8), 3.0, jnp.float32)
    np.testing.assert_allclose(norm(x), np.full((8, 8), 1 + 2.0**-9), rtol=1e-7)
