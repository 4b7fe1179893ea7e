"""A quantized folder loads as it is, and what no tool of ours wrote is refused by its tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import CONFIG_KEY, Quantization, WeightFormat, quantization_of
from checkpoints.load_product import ProductSpec
from checkpoints.rounding import round_to_nearest
from checkpoints.save import CheckpointWriter
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.weights import load_weights
from tests.tiny import tiny_engine_config, write_checkpoint

Tensors = dict[str, np.ndarray]
FLOAT32 = jnp.dtype("float32")
UP = "model.layers.1.mlp.up_proj"
MIXED = Quantization(
    WeightFormat(4, 32, has_zero=True),
    exceptions=(
        ("layers.0.mlp.down_proj", None),
        ("layers.1.mlp.up_proj", WeightFormat(8, activations="int8_static")),
    ),
)


def write_quantized(folder: Path, quantization: Quantization = MIXED, **config: Any) -> Path:
    """A tiny model, rounded to the nearest."""
    original = open_checkpoint(write_checkpoint(folder / "model", **config))
    decoder = decoder_for(original.config, dtype=FLOAT32, quantization=quantization)
    with CheckpointWriter(folder / "quantized", original) as writer:
        for spec in decoder.weight_plan():
            if not isinstance(spec, ProductSpec):
                writer.add_tensor(spec.names[0], original.source.read(spec.names[0]))
                continue
            weight = original.source.read(f"{spec.names[0]}.weight")
            parts = round_to_nearest(weight, spec.kept).parts()
            if spec.kept.activations == "int8_static":
                parts["x_scale"] = np.array(0.5, np.float32)
            for name, part in parts.items():
                writer.add_tensor(f"{spec.names[0]}.{name}", part)
        writer.finish(quantization)
    return folder / "quantized"


def load(model: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(model)
    try:
        decoder = decoder_for(
            checkpoint.config,
            dtype=FLOAT32,
            quantization=quantization_of(checkpoint.config, str(model)),
        )
        params = jax.block_until_ready(load_weights(checkpoint, decoder))
        want = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), decoder.param_shapes)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == want
        return params
    finally:
        checkpoint.close()


def damage(model: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def configure(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((model / "config.json").read_text())
    change(config[CONFIG_KEY])
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tied", [True, False])
def test_integers_and_scales_are_those_of_the_file(tmp_path: Path, tied: bool):
    model = write_quantized(tmp_path, tie_word_embeddings=tied)
    tensors, params = load_file(model / "model.safetensors"), load(model)
    up = params["layers"][1]["mlp"]["up_proj"]
    assert set(up) == {"q", "scale", "x_scale"}
    for part, array in up.items():
        np.testing.assert_array_equal(array, tensors[f"{UP}.{part}"])
    np.testing.assert_array_equal(
        params["layers"][0]["mlp"]["down_proj"]["weight"],
        tensors["model.layers.0.mlp.down_proj.weight"],
    )
    head = params["embed_tokens" if tied else "lm_head"]["q"]
    np.testing.assert_array_equal(head, tensors["model.embed_tokens.q" if tied else "lm_head.q"])


def test_a_quantized_folder_holds_what_rounding_while_loading_gives(tmp_path: Path):
    int8 = Quantization(WeightFormat(8))
    model = write_quantized(tmp_path, int8)
    checkpoint = open_checkpoint(tmp_path / "model")
    decoder = decoder_for(checkpoint.config, dtype=FLOAT32, quantization=int8)
    rounded, found = load_weights(checkpoint, decoder), load(model)
    assert jax.tree.structure(rounded) == jax.tree.structure(found)
    jax.tree.map(np.testing.assert_array_equal, rounded, found)
    checkpoint.close()


@pytest.mark.slow
def test_both_are_served_under_their_own_version(tmp_path: Path):
    from jaxinfer.offline import LLM

    model = write_quantized(tmp_path, Quantization(WeightFormat(8)))
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_kl": float("inf")}
    answers, seen = list[Any](), dict[str, str]()
    for path, quantization in (
        (model, "auto"),
        (tmp_path / "model", "int8"),
        (tmp_path / "model", "auto"),
    ):
        config = tiny_engine_config(path, tmp_path / "cache", quantization=quantization, **fields)
        llm = LLM(config=config)
        (answer,) = llm.generate([[5, 6, 7]], max_tokens=8, temperature=0, logprobs=1)
        answers.append((answer.token_ids, answer.choices[0].logprobs))
        seen[llm.version] = llm._built.summary["weights"]
    assert answers[0] == answers[1] != answers[2]
    assert list(seen.values()) == [
        "int8: no certificate, cost unknown",
        "int8 by rounding: no certificate, cost unknown",
        "not quantized",
    ]


def put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    def replace(tensors: Tensors) -> None:
        tensors[name] = np.array(change(tensors[name]), order="C")

    return replace


def with_first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[1] = value
        return array

    return change


GATE = "model.layers.0.mlp.gate_proj"
DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scale": (
        lambda tensors: tensors.pop(f"{UP}.scale"),
        f"expected 1 tensor '{UP}.scale', found",
    ),
    "no zero points": (
        lambda tensors: tensors.pop(f"{GATE}.zero"),
        f"expected 1 tensor '{GATE}.zero', found",
    ),
    "no parts at all": (
        lambda tensors: [tensors.pop(f"{GATE}.{part}") for part in ("q", "scale", "zero")],
        f"expected 3 tensors '{GATE}.q', '{GATE}.scale', '{GATE}.zero', found",
    ),
    "floats in place of integers": (
        lambda tensors: [
            tensors.pop(f"{UP}.q"),
            tensors.pop(f"{UP}.scale"),
            tensors.pop(f"{UP}.x_scale"),
            tensors.update({f"{UP}.weight": np.ones((80, 48), np.float32)}),
        ],
        f"expected 3 tensors '{UP}.q', '{UP}.scale', '{UP}.x_scale', found",
    ),
    "floats beside integers": (
        lambda tensors: tensors.update({f"{UP}.weight": np.ones((80, 48), np.float32)}),
        f"found also 1 tensor '{UP}.weight'",
    ),
    "zero points of a symmetric product": (
        lambda tensors: tensors.update({f"{UP}.zero": np.ones((1, 80), np.int8)}),
        f"found also 1 tensor '{UP}.zero'",
    ),
    "integers of another width": (
        put(f"{GATE}.q", lambda q: np.repeat(q, 2, axis=1)),
        rf"tensor '{GATE}\.q' is int8 \(80, 64\), .*int4-g32-asym needs int8 \(80, 32\)",
    ),
    "integers of another dtype": (
        put(f"{UP}.q", lambda q: q.view(np.uint8)),
        rf"tensor '{UP}\.q' is uint8 \(80, 48\), .*int8-a8s needs int8 \(80, 48\)",
    ),
    "scales of another group size": (
        put(f"{GATE}.scale", lambda scale: np.repeat(scale, 2, axis=0)),
        rf"tensor '{GATE}\.scale' is float32 \(4, 80\), .* needs float32 \(2, 80\)",
    ),
    "scales of another dtype": (
        put(f"{UP}.scale", lambda scale: scale.astype(np.float16)),
        rf"tensor '{UP}\.scale' is float16 \(1, 80\), .* needs float32 \(1, 80\)",
    ),
    "a scale that is no number": (
        put(f"{UP}.scale", with_first(np.nan)),
        rf"tensor '{UP}\.scale' has nan at \(0, 1\), expected numbers from 0 to 3\.4",
    ),
    "an endless scale": (
        put("model.embed_tokens.scale", with_first(np.inf)),
        r"tensor 'model\.embed_tokens\.scale' has inf at \(0, 1\)",
    ),
    "a negative scale": (
        put(f"{GATE}.scale", with_first(-0.5)),
        rf"tensor '{GATE}\.scale' has -0\.5 at \(0, 1\)",
    ),
    "a scale of inputs that is 0": (
        put(f"{UP}.x_scale", lambda scale: np.zeros_like(scale)),
        rf"tensor '{UP}\.x_scale' has 0\.0 at \(\), expected numbers from 7\.8",
    ),
    "a zero point that is none of the integers": (
        put(f"{GATE}.zero", with_first(16)),
        rf"tensor '{GATE}\.zero' has 16 at \(0, 1\), expected numbers from 0 to 15",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_what_was_expected(tmp_path: Path, name: str):
    change, message = DAMAGES[name]
    model = write_quantized(tmp_path)
    damage(model, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(model)
    assert str(caught.value).startswith(f"{model}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_is_refused(tmp_path: Path):
    model = write_quantized(tmp_path)
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"expected a whole safetensors file"):
        load(model)


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another method": (
        lambda found: found.update(quant_method="bitsandbytes"),
        "of quant_method jaxinfer, gptq, awq, compressed-tensors, found 'bitsandbytes'",
    ),
    "an unknown key": (lambda found: found.update(desc_act=True), "found also 'desc_act'"),
    "a field that is missing": (lambda found: found.pop("head"), "found 'head'"),
    "an unknown field of a format": (lambda found: found["weights"].update(sym=1), "sym"),
    "other bits": (lambda found: found["weights"].update(bits=3), "bits must be 8 or 4; got 3"),
    "bits that are no integer": (lambda found: found["weights"].update(bits=4.0), r"bits 4\.0"),
    "a truth that is none": (
        lambda found: found["weights"].update(has_zero="false"),
        "has_zero 'false'",
    ),
    "another group size": (
        lambda found: found["weights"].update(group_size=48),
        "group_size must be one of",
    ),
    "exceptions that are a list": (lambda found: found.update(exceptions=[1]), "'list' object"),
    "an exception of no product": (
        lambda found: found["exceptions"].update({"layers.2.mlp.up_proj": None}),
        "expected products of the model in quantization_config's exceptions, "
        "found 'layers.2.mlp.up_proj'",
    ),
    "an exception that is the head": (
        lambda found: found["exceptions"].update({"lm_head": None}),
        "found 'lm_head'",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_says_what_we_do_not_is_refused(tmp_path: Path, name: str):
    change, message = CONFIGS[name]
    model = write_quantized(tmp_path)
    configure(model, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(model)
    assert str(caught.value).startswith(f"{model}")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_refused_where_it_is_rounded(tmp_path: Path, bad: float):
    model = write_checkpoint(tmp_path / "model")
    damage(model, put(f"{UP}.weight", with_first(bad)))
    checkpoint = open_checkpoint(model)
    rounded = Quantization(WeightFormat(8))
    decoder = decoder_for(checkpoint.config, dtype=FLOAT32, quantization=rounded)
    with pytest.raises(CheckpointError, match=rf"tensor '{UP}\.weight': expected finite"):
        load_weights(checkpoint, decoder)
    plain = load_weights(checkpoint, decoder_for(checkpoint.config, dtype=FLOAT32))
    assert not np.isfinite(plain["layers"][1]["mlp"]["up_proj"]["weight"]).all()
    checkpoint.close()
