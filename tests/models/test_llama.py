"""The decoder against an independent one in numpy float64, for every detail of its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.layers import Embedding, Linear, RMSNorm
from tests.models.reference_decoder import ReferenceDecoder
from tests.models.tiny_decoder import MISTRAL, ONE_KV_HEAD, QWEN2, TinyDecoder, load_tiny
from tests.tiny import tiny_config, tiny_tensors

FLOAT32 = Arithmetic(jnp.dtype("float32"))
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, every bias, untied": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "llama, one kv head, another theta and eps": ONE_KV_HEAD
    | {"rope_theta": 300.0, "rms_norm_eps": 0.1},
    "qwen2, untied": QWEN2 | {"tie_word_embeddings": False},
    "mistral": MISTRAL | {"sliding_window": None},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    return load_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_those_of_the_reference_decoder(name: str, tmp_path: Path):
    tiny = load_tiny(tmp_path, **FAMILY[name])
    ids = tiny.random_ids(40)
    want = tiny.reference.logits(ids)
    assert np.ptp(want) > 5  # neither flat nor degenerate
    np.testing.assert_allclose(tiny.dense(ids), want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4,)])
def test_token_by_token_is_the_same_as_all_at_once(llama: TinyDecoder, cuts: tuple[int, ...]):
    ids = llama.random_ids(6, seed=1)
    want = llama.reference.logits(ids)
    np.testing.assert_allclose(llama.dense(ids, cuts), want, rtol=1e-4, atol=2e-4)


def test_a_later_token_changes_no_earlier_logits(llama: TinyDecoder):
    ids = llama.random_ids(8, seed=2)
    changed = [*ids[:5], (ids[5] + 1) % llama.vocab_size, *ids[6:]]
    before, after = llama.dense(ids), llama.dense(changed)
    np.testing.assert_array_equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).any(axis=1).all()


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        (QWEN2, "self_attn.q_proj.bias"),
        ({"attention_bias": True}, "self_attn.o_proj.bias"),
        ({"mlp_bias": True}, "mlp.down_proj.bias"),
    ],
)
def test_a_bias_left_out_would_show(changes: dict[str, Any], left_out: str):
    """The comparison with the reference can fail."""
    config = tiny_config(**changes)
    tensors = tiny_tensors(config)
    without = {name: x for name, x in tensors.items() if not name.endswith(left_out)}
    ids = list(range(20))
    full, less = (ReferenceDecoder(config, t).logits(ids) for t in (tensors, without))
    assert np.abs(full - less).max() > 0.1


def test_bfloat16_follows_float32(tmp_path: Path):
    tiny = load_tiny(tmp_path, dtype="bfloat16")
    ids = tiny.random_ids(20)
    got, want = tiny.dense(ids), tiny.reference.logits(ids)
    assert got.dtype == np.float32  # logits are never rounded to bfloat16
    error = np.sqrt(np.mean((got - want) ** 2)) / want.std()
    assert 1e-4 < error < 0.05


def test_linear_adds_its_bias_in_float32():
    layer = Linear(8, 3, use_bias=True, arithmetic=FLOAT32)
    rng = np.random.default_rng(0)
    weight, bias, x = (rng.normal(size=s).astype(np.float32) for s in ((3, 8), (3,), (5, 8)))
    assert layer.bias is not None
    layer.weight[...], layer.bias[...] = jnp.asarray(weight), jnp.asarray(bias)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ weight.T + bias, rtol=1e-5, atol=1e-5)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    norm = RMSNorm(48, eps=1e-5, arithmetic=Arithmetic(jnp.dtype("bfloat16")))
    norm.weight[...] = jnp.linspace(0.5, 2, 48).astype(jnp.bfloat16)
    x = np.random.default_rng(1).normal(size=(8, 48)) * 30
    wide = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64)
    weight = np.asarray(norm.weight[...], np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    got = norm(jnp.asarray(x).astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), np.asarray(jnp.asarray(want, jnp.bfloat16)))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm_adds_eps_to_the_mean_square(eps: float, size: float):
    norm = RMSNorm(48, eps=eps, arithmetic=FLOAT32)
    norm.weight[...] = jnp.ones(48)
    x = (np.random.default_rng(2).normal(size=(8, 48)) * size).astype(np.float32)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-5)


def test_embedding_takes_rows():
    embedding = Embedding(5, 4, arithmetic=FLOAT32)
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    embedding.weight[...] = jnp.asarray(table)
    np.testing.assert_array_equal(embedding(jnp.array([4, 0, 4])), table[[4, 0, 4]])
