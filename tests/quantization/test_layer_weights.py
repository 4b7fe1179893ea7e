"""Scales fold exactly: the layer computes what it did before, whether quantized or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor
from checkpoints.rounding import round_to_nearest
from jaxinfer.models.attention import DenseKV
from jaxinfer.quantization.layer_weights import LayerWeights
from jaxinfer.quantization.sites import GEMMA3 as GEMMA3_SITES
from jaxinfer.quantization.sites import LLAMA, Fold, Site
from tests.models.tiny_decoder import GEMMA3, TinyDecoder, load_tiny

HEAD_DIM, SHARED = 16, 3
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    return load_tiny(tmp_path_factory.mktemp("model"), **BIASED)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    return load_tiny(tmp_path_factory.mktemp("gemma3"), **GEMMA3, attention_bias=True)


Output = Callable[[dict[str, Any]], np.ndarray]


def output_of(tiny: TinyDecoder) -> Output:
    """A function of the parameters of layer 1: what it gives of fixed inputs."""
    x = np.random.default_rng(0).normal(size=(8, 48)).astype(np.float32)
    _, rope = tiny.decoder.bind_top(tiny.params).begin(jnp.arange(8), jnp.arange(8))
    kind = tiny.decoder.layer_kinds[1]

    @jax.jit
    def run(params: dict[str, Any]) -> jax.Array:
        layer = tiny.decoder.bind_layer(params, kind)
        return layer(jnp.asarray(x), rope, DenseKV(tiny.decoder.config))

    return lambda params: np.asarray(run(params))


@pytest.fixture(scope="module")
def output(tiny: TinyDecoder) -> Output:
    return output_of(tiny)


@pytest.fixture(scope="module")
def gemma3_output(gemma3: TinyDecoder) -> Output:
    return output_of(gemma3)


def layer_of(tiny: TinyDecoder) -> LayerWeights:
    return LayerWeights(jax.tree.map(np.array, tiny.params["layers"][1]))


def scales_for(site: Site, layer: LayerWeights) -> tuple[np.ndarray, np.ndarray]:
    """Random ones for the inputs, and for what makes them."""
    width = layer.weight(site.name).shape[1]
    drawn = np.exp(np.random.default_rng(1).normal(size=width)).astype(np.float32)
    if not site.is_by_heads:
        return drawn, drawn
    folded = drawn[: width // SHARED].reshape(-1, HEAD_DIM)
    return np.repeat(folded, SHARED, axis=0).reshape(-1), folded.reshape(-1)


@pytest.mark.parametrize("site", LLAMA.sites, ids=lambda site: site.name)
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_layer_with_scaled_channels_gives_the_same(
    tiny: TinyDecoder, output: Output, site: Site, is_quantized: bool
):
    layer = layer_of(tiny)
    assert site.fold is not None
    if is_quantized and site.fold.form == "rows":
        kept = WeightFormat(4, 32, has_zero=True)
        layer.quantize(site.fold.module, round_to_nearest(layer.weight(site.fold.module), kept))
    before, weight = output(layer.params), layer.weight(site.name)
    layer.scale_channels(site, *scales_for(site, layer))
    assert np.abs(layer.weight(site.name) / weight - 1).max() > 1
    np.testing.assert_allclose(output(layer.params), before, atol=2e-5 * np.abs(before).max())


@pytest.mark.parametrize("site", GEMMA3_SITES.sites, ids=lambda site: site.name)
def test_a_layer_of_gemma_3_with_scaled_channels_gives_the_same(
    gemma3: TinyDecoder, gemma3_output: Output, site: Site
):
    layer = layer_of(gemma3)
    before, weight = gemma3_output(layer.params), layer.weight(site.name)
    layer.scale_channels(site, *scales_for(site, layer))
    assert np.abs(layer.weight(site.name) / weight - 1).max() > 1
    after = gemma3_output(layer.params)
    np.testing.assert_allclose(after, before, atol=2e-5 * np.abs(before).max())


def test_a_norm_that_multiplies_by_one_plus_its_weight_folds():
    params = {
        "norm": {"weight": np.array([0, 1], np.float32)},
        "product": {"weight": np.array([[3, 4]], np.float32)},
    }
    layer = LayerWeights(params)
    scales = np.array([2, 4], np.float32)
    layer.scale_channels(Site(("product",), Fold("norm", "norm_plus_one")), scales, scales)
    assert params["norm"]["weight"].tolist() == [-0.5, -0.5]
    assert params["product"]["weight"].tolist() == [[6, 16]]


def test_scaled_keys_give_the_same_scores(tiny: TinyDecoder, output: Output):
    layer = layer_of(tiny)
    before = output(layer.params)
    rows = np.random.default_rng(2).normal(size=(5, 48)).astype(np.float32)
    keys = layer.product_of("self_attn.k_proj", rows)
    half = np.exp(np.random.default_rng(1).normal(size=(2, HEAD_DIM // 2))).astype(np.float32)
    scales = np.concatenate([half, half], axis=1)
    assert LLAMA.key_rows is not None
    layer.scale_keys(LLAMA.key_rows, scales)
    np.testing.assert_allclose(
        layer.product_of("self_attn.k_proj", rows), keys / scales.reshape(-1), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(output(layer.params), before, atol=2e-5 * np.abs(before).max())


def test_a_file_holds_the_parts_of_quantized_products_and_floats_of_the_rest():
    norm, weight = np.ones(2, np.float32), np.array([[3, 4]], np.float32)
    site = Site(("product",), None)
    layer = LayerWeights({"norm": {"weight": norm}, "product": {"weight": weight}})
    made = QTensor(
        np.array([[3, 4]], np.int8), np.array([[0.5]], np.float32), None, WeightFormat(8)
    )
    layer.quantize("product", made)
    layer.x_scales["product"] = 0.25
    assert layer.weight("product").tolist() == [[1.5, 2.0]]
    held = {name: array.tolist() for name, array in layer.tensors([site])}
    assert held == {
        "norm.weight": [1, 1],
        "product.q": [[3, 4]],
        "product.scale": [[0.5]],
        "product.x_scale": 0.25,
    }
