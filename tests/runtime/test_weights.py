"""Every tensor of a file is used and every parameter filled, or loading says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.weights import load_weights
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

Tensors = dict[str, np.ndarray]
NORM = "model.layers.1.input_layernorm.weight"


def load(
    folder: Path,
    change: Callable[[Tensors], object] | None = None,
    *,
    dtype: str = "float32",
    **config: Any,
) -> tuple[Decoder, dict[str, Any]]:
    """Writes a checkpoint, changes its tensors, and loads it."""
    model = write_checkpoint(folder / "model", **config)
    if change is not None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors")
    checkpoint = open_checkpoint(model)
    try:
        decoder = decoder_for(checkpoint.config, dtype=jnp.dtype(dtype))
        params = load_weights(checkpoint, decoder)
        jax.block_until_ready(params)
        return decoder, params
    finally:
        checkpoint.close()


def flat(decoder: Decoder, params: Any) -> dict[str, np.ndarray]:
    """Parameters by their tensor's name."""
    found: dict[str, np.ndarray] = {}
    for spec in decoder.weight_plan():
        leaf = params
        for key in spec.path:
            leaf = leaf[key]
        found[spec.names[0]] = np.asarray(leaf)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_lands_in_its_parameter(tmp_path: Path, tied: bool):
    decoder, params = load(tmp_path, tie_word_embeddings=tied)
    want = tiny_tensors(tiny_config(tie_word_embeddings=tied))
    got = flat(decoder, params)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(got[name], tensor)
    assert jax.tree.structure(params) == jax.tree.structure(decoder.param_shapes)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_what_a_file_stores_is_widened(tmp_path: Path, stored: str):
    dtype = np.dtype(getattr(ml_dtypes, stored, stored))

    def store(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(dtype)

    decoder, params = load(tmp_path, store)
    want = tiny_tensors(tiny_config())
    for name, got in flat(decoder, params).items():
        np.testing.assert_array_equal(got, want[name].astype(dtype).astype(np.float32))


def test_tensors_are_converted_to_the_decoders_dtype(tmp_path: Path):
    decoder, params = load(tmp_path, dtype="bfloat16")
    want = tiny_tensors(tiny_config())
    for name, got in flat(decoder, params).items():
        np.testing.assert_array_equal(got, np.asarray(jnp.asarray(want[name], jnp.bfloat16)))


def test_half_precision_files_are_widened_exactly(tmp_path: Path):
    def halve(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(np.float16)

    decoder, params = load(tmp_path, halve)
    want = tiny_tensors(tiny_config())
    for name, got in flat(decoder, params).items():
        np.testing.assert_array_equal(got, want[name].astype(np.float16).astype(np.float32))


def test_a_missing_tensor_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=f"expected 1 tensor '{NORM}', found"):
        load(tmp_path, lambda tensors: tensors.pop(NORM))


def test_a_tensor_that_nothing_uses_is_named(tmp_path: Path):
    extra = "model.layers.1.self_attn.q_norm.weight"
    with pytest.raises(CheckpointError, match=f"found also 1 tensor '{extra}'"):
        load(tmp_path, lambda tensors: tensors.update({extra: np.ones(16, np.float32)}))


def test_a_bias_that_the_config_does_not_announce_is_refused(tmp_path: Path):
    bias = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(CheckpointError, match=bias):
        load(tmp_path, lambda tensors: tensors.update({bias: np.ones(96, np.float32)}))


def test_qwen2_without_its_bias_is_refused(tmp_path: Path):
    bias = "model.layers.0.self_attn.k_proj.bias"
    qwen2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(CheckpointError, match=f"expected 1 tensor '{bias}'"):
        load(tmp_path, lambda tensors: tensors.pop(bias), **qwen2)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path):
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, lambda tensors: tensors.update({NORM: np.ones(47, np.float32)}))
    assert f"tensor '{NORM}' has shape (47,), the model needs (48,)" in str(caught.value)


def test_rotary_tables_in_the_file_are_ignored(tmp_path: Path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    decoder, params = load(tmp_path, lambda t: t.update({name: np.ones(8, np.float32)}))
    assert name not in flat(decoder, params)


def test_names_without_the_prefix_are_found(tmp_path: Path):
    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    decoder, params = load(tmp_path, strip)
    want = tiny_tensors(tiny_config())
    for name, got in flat(decoder, params).items():
        np.testing.assert_array_equal(got, want[name])


def head(value: float) -> Callable[[Tensors], object]:
    def add(tensors: Tensors) -> None:
        shape = tensors["model.embed_tokens.weight"].shape
        tensors["lm_head.weight"] = np.full(shape, value, np.float32)

    return add


def test_a_head_beside_tied_embeddings_is_reported_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    decoder, params = load(tmp_path, head(9.0), tie_word_embeddings=True)
    (record,) = caplog.records
    assert "lm_head.weight is not used, the embedding is the head" in record.getMessage()
    assert "lm_head" not in params
    hidden = jnp.eye(8, 48, dtype=jnp.float32)
    logits = decoder.bind_top(params).logits(hidden)
    np.testing.assert_allclose(logits, params["embed_tokens"]["weight"][:, :8].T, rtol=1e-6)


def test_an_untied_head_that_is_absent_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"expected 1 tensor 'lm_head\.weight'"):
        load(tmp_path, lambda t: t.pop("lm_head.weight"), tie_word_embeddings=False)


def test_an_untied_head_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    decoder, params = load(tmp_path, head(0.5), tie_word_embeddings=False)
    logits = decoder.bind_top(params).logits(jnp.ones((8, 48), jnp.float32))
    np.testing.assert_allclose(logits, np.full((8, decoder.config.vocab_size), 24.0))
    assert not caplog.records


def test_a_config_that_says_nothing_of_tying_needs_a_head(tmp_path: Path):
    """Hugging Face's default for these families."""
    model = write_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    del config["tie_word_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(model)
    decoder = decoder_for(checkpoint.config, dtype=jnp.dtype("float32"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_weights(checkpoint, decoder)
    checkpoint.close()


def test_loading_can_be_ended_after_any_tensor(tmp_path: Path):
    seen: list[int] = []

    def stop() -> None:
        seen.append(1)
        if len(seen) == 3:
            raise TimeoutError("enough")

    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model"))
    try:
        decoder = decoder_for(checkpoint.config, dtype=jnp.dtype("float32"))
        with pytest.raises(TimeoutError, match="enough"):
            load_weights(checkpoint, decoder, on_tensor=stop)
    finally:
        checkpoint.close()
    assert len(seen) == 3
