"""A whole model to integers: complete, repeatable, near the original, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat
from checkpoints.load import load_params
from jaxinfer.errors import ConfigError, EngineFailure
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.registry import decoder_for
from jaxinfer.quantization.calibration_check import NotEnoughCalibration
from jaxinfer.quantization.calibration_set import CalibrationSet, Kind
from jaxinfer.quantization.quantizer import Quantized, quantize
from jaxinfer.quantization.recipe import Recipe
from tests.held_tensors import Held
from tests.models.tiny_decoder import GEMMA3, QWEN2_MOE
from tests.quantization.calibration_world import random_set
from tests.tiny import write_checkpoint

SMALL = random_set({"short": [60] * 16})
INT4 = WeightFormat(4, 32)
Tensors = dict[str, np.ndarray]


@dataclass
class Made:
    tensors: Tensors
    quantized: Quantized
    progress: list[tuple[str, int, int]]


def made(model: Path, recipe: Recipe, calibration: CalibrationSet = SMALL) -> Made:
    tensors, progress = Tensors(), list[tuple[str, int, int]]()

    def add(name: str, array: np.ndarray) -> None:
        assert name not in tensors
        tensors[name] = np.array(array)

    found = quantize(
        open_checkpoint(model),
        recipe,
        calibration,
        seed=3,
        add_tensor=add,
        on_progress=lambda *step: progress.append(step),
    )
    return Made(tensors, found, progress)


def logits_of(model: Path, tensors: Tensors | None, kept: Quantization | None) -> np.ndarray:
    checkpoint = open_checkpoint(model)
    decoder = decoder_for(checkpoint.config, dtype=jnp.dtype("float32"), quantization=kept)
    source = checkpoint.source if tensors is None else Held(tensors)
    params = load_params(source, decoder.weight_plan(), dtype=np.float32, file="tensors")
    ids = jnp.asarray(np.random.default_rng(9).integers(0, 256, 40), jnp.int32)
    caches = [DenseKV(decoder.config) for _ in params["layers"]]
    return np.asarray(jax.nn.log_softmax(decoder.run_dense(params, ids, caches)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("made") / "model", attention_bias=True)


@pytest.fixture(scope="module")
def int4(model: Path) -> Made:
    return made(model, Recipe(INT4, method="gptq", migrate_keys=True))


def test_the_tensors_are_those_that_the_model_loads_and_it_answers_alike(model: Path, int4: Made):
    whole = logits_of(model, None, None)
    four = logits_of(model, int4.tensors, int4.quantized.quantization)
    assert int4.quantized.quantization == Quantization(INT4)
    assert (
        0 < np.abs(four - whole).mean() < 0.5 * np.abs(whole - whole.mean(axis=1)[:, None]).mean()
    )


def test_errors_are_told_of_each_product_in_order_and_are_below_round_to_nearest(int4: Made):
    errors = int4.quantized.layer_errors
    assert [error.product for error in errors][:4] == [
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.k_proj",
        "layers.0.self_attn.v_proj",
        "layers.0.self_attn.o_proj",
    ]
    assert len(errors) == 14
    assert {error.format for error in errors} == {"int4-g32"}
    assert all(0 < error.error < error.error_of_nearest < 0.5 for error in errors)


def test_progress_counts_every_product_once(int4: Made):
    assert [done for _, done, _ in int4.progress] == [*range(1, 16)]
    assert {total for _, _, total in int4.progress} == {15}
    assert int4.progress[-1][0] == "layers.1.mlp.down_proj"


def test_experts_are_rounded_to_the_nearest_and_routers_stay(tmp_path: Path):
    model = write_checkpoint(tmp_path / "moe", **QWEN2_MOE, mlp_only_layers=[1])
    found = made(model, Recipe(WeightFormat(8, 32), method="gptq", migrate=False))
    errors = {error.product: error for error in found.quantized.layer_errors}
    assert {total for _, _, total in found.progress} == {1 + 4 + 6 + 4 + 3} == {1 + len(errors)}
    assert 0 < errors["layers.0.mlp.experts.up_proj"].error < 0.01
    assert found.tensors["model.layers.0.mlp.experts.down_proj.q"].shape == (6 * 48, 24)
    assert "model.layers.0.mlp.gate.weight" in found.tensors
    whole = logits_of(model, None, None)
    eight = logits_of(model, found.tensors, found.quantized.quantization)
    assert 0 < np.abs(eight - whole).mean() < 0.1
    static = Recipe(WeightFormat(8, activations="int8_static"), method="nearest")
    with pytest.raises(ConfigError, match="an expert meets too few tokens"):
        made(model, static)


@pytest.mark.slow
def test_the_same_arguments_give_the_same_bytes(model: Path, int4: Made):
    again = made(model, Recipe(INT4, method="gptq", migrate_keys=True))
    assert again.quantized == int4.quantized
    assert again.tensors.keys() == int4.tensors.keys()
    for name, tensor in int4.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], tensor, err_msg=name)


@pytest.mark.slow
def test_products_that_four_bits_hurt_are_kept_at_eight(model: Path, int4: Made):
    errors = sorted(error.error for error in int4.quantized.layer_errors)
    middle = errors[len(errors) // 2]
    recipe = Recipe(INT4, method="gptq", migrate_keys=True, keep_at_8_bits=middle)
    mixed = made(model, recipe)
    kept = dict(mixed.quantized.quantization.exceptions)
    assert 0 < len(kept) < 14
    assert set(kept.values()) == {WeightFormat(8, 32)}
    assert all(error.error <= middle for error in mixed.quantized.layer_errors)
    of_eight = [e.product for e in mixed.quantized.layer_errors if e.format == "int8-g32"]
    assert sorted(of_eight) == [*kept]
    whole = logits_of(model, None, None)
    far = [
        np.abs(logits_of(model, one.tensors, one.quantized.quantization) - whole).mean()
        for one in (int4, mixed)
    ]
    assert far[1] < far[0]


@pytest.mark.slow
def test_static_scales_are_of_the_site_and_served(model: Path):
    # With other seeds 4 of a site's 80 channels reach beyond what was learned, and it is refused.
    lengths: dict[Kind, list[int]] = {
        "short": [64] * 128,
        "long": [250] * 24,
        "multi_turn": [100] * 16,
    }
    calibration = random_set(lengths, seed=3)
    recipe = Recipe(WeightFormat(8, activations="int8_static"), method="nearest")
    found = made(model, recipe, calibration)
    by_site = [
        float(found.tensors[f"model.layers.0.self_attn.{name}_proj.x_scale"]) for name in "qkvo"
    ]
    assert by_site[0] == by_site[1] == by_site[2] != by_site[3]
    whole = logits_of(model, None, None)
    static = logits_of(model, found.tensors, found.quantized.quantization)
    assert 0 < np.abs(static - whole).mean() < 0.1


@pytest.mark.slow
def test_eight_bits_are_nearer_than_four(model: Path, int4: Made):
    whole = logits_of(model, None, None)
    eight = made(model, Recipe(WeightFormat(8), method="auto"))
    far = [
        np.abs(logits_of(model, one.tensors, one.quantized.quantization) - whole).mean()
        for one in (int4, eight)
    ]
    assert far[1] < far[0] / 8


def test_static_scales_are_refused_with_too_little_data(model: Path):
    recipe = Recipe(WeightFormat(8, activations="int8_static"))
    with pytest.raises(NotEnoughCalibration, match="16 samples of at least 64"):
        made(model, recipe)


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with some tensors changed, or taken away (None)."""

    def damage(changes: dict[str, np.ndarray | None], **config: Any) -> Path:
        copy = write_checkpoint(tmp_path / "model", attention_bias=True, **config)
        tensors = load_file(copy / "model.safetensors") | changes
        save_file(
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            copy / "model.safetensors",
        )
        return copy

    return damage


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.v_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_not_finite_is_refused_by_name(
    model: Path, damaged: Callable[..., Path], name: str
):
    tensor = load_file(model / "model.safetensors")[name]
    tensor.reshape(-1)[3] = np.nan
    with pytest.raises(CheckpointError, match=f"{name}.*NaN or infinity"):
        made(damaged({name: tensor}), Recipe(INT4))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "model.layers.1.mlp.up_proj.weight"),
        (
            {"model.layers.2.strange": np.zeros(3, np.float32)},
            "for 1 the model has no place .*layers.2.strange",
        ),
    ],
)
def test_a_missing_and_a_superfluous_tensor_are_refused_before_any_work(
    damaged: Callable[..., Path], changes: dict[str, np.ndarray | None], named: str
):
    with pytest.raises(CheckpointError, match=named):
        made(damaged(changes), Recipe(INT4))


def test_a_model_that_is_quantized_already_is_refused(damaged: Callable[..., Path]):
    kept = Quantization(WeightFormat(8)).to_config()
    with pytest.raises(CheckpointError, match="quantized already"):
        made(damaged({}, quantization_config=kept), Recipe(INT4))


def test_an_architecture_without_sites_is_refused(damaged: Callable[..., Path]):
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*got PhiForCausalLM"):
        made(damaged({}, architectures=["PhiForCausalLM"]), Recipe(INT4))


def test_keys_that_are_normed_cannot_be_scaled(tmp_path: Path):
    gemma3 = write_checkpoint(tmp_path / "gemma3", **GEMMA3)
    with pytest.raises(ConfigError, match=r"--kv-keys"):
        made(gemma3, Recipe(INT4, migrate_keys=True))


@pytest.mark.slow
def test_inputs_that_overflow_are_refused_by_site(damaged: Callable[..., Path]):
    huge = np.full((48,), 3e38, np.float32)
    model = damaged({"model.layers.1.input_layernorm.weight": huge})
    with pytest.raises(EngineFailure, match=r"layers.1.self_attn.q_proj takes NaN or infinite"):
        made(model, Recipe(WeightFormat(8), method="nearest", migrate=False))


@pytest.mark.slow
def test_a_model_whose_layers_differ_in_window_and_norm_more_is_near_the_original(tmp_path: Path):
    gemma3 = write_checkpoint(tmp_path / "gemma3", **GEMMA3)
    eight = WeightFormat(8, activations="int8")
    found = made(gemma3, Recipe(eight, method="nearest"))
    before = logits_of(gemma3, None, None)
    after = logits_of(gemma3, found.tensors, Quantization(eight))
    off = float((np.exp(before) * (before - after)).sum(axis=1).mean())
    assert off < 0.02
    assert len(found.quantized.layer_errors) == 4 * 7
