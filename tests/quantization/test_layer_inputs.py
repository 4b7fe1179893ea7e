"""What the products of a layer take in, over windows that are filled up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.attention import DenseKV
from jaxinfer.quantization.layer_inputs import LayerInputs, SiteInputs
from jaxinfer.quantization.sites import LLAMA
from jaxinfer.quantization.windows import windows_of
from tests.models.tiny_decoder import TinyDecoder, load_tiny
from tests.quantization.calibration_world import random_set

QKV = LLAMA.sites[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    return load_tiny(tmp_path_factory.mktemp("model"))


def normed(tiny: TinyDecoder, ids: tuple[int, ...]) -> np.ndarray:
    """What q, k and v of the first layer take, in plain numpy."""
    x = np.asarray(tiny.params["embed_tokens"]["weight"])[np.array(ids)].astype(np.float64)
    rms = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + tiny.decoder.config.rms_norm_eps)
    return x / rms * np.asarray(tiny.params["layers"][0]["input_layernorm"]["weight"])


def top_of(tiny: TinyDecoder) -> dict[str, Any]:
    return {name: part for name, part in tiny.params.items() if name != "layers"}


def test_inputs_are_those_of_real_tokens_held_ones_apart(tiny: TinyDecoder):
    calibration = random_set({"short": [5, 9, 4, 11, 3, 8, 6, 7]})
    windows = windows_of(calibration, bos=None, max_length=640, seed=0)
    inputs = LayerInputs(tiny.decoder, LLAMA.sites, "float", windows)
    hidden = inputs.begin(top_of(tiny))
    found = inputs.inputs(tiny.params["layers"][0], hidden, {}, kind=0, site=QKV)
    every = [normed(tiny, sample.token_ids) for sample in calibration.samples]
    learned, held = np.concatenate(every[:7]), every[7]
    both = np.concatenate([learned, held])
    np.testing.assert_allclose(found.hessian, both.T @ both / 53, atol=1e-5)
    np.testing.assert_allclose(found.held_hessian, held.T @ held / 7, atol=1e-5)
    np.testing.assert_allclose(found.largest, np.abs(learned).max(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.held_largest, np.abs(held).max(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.rows, both, atol=1e-5)


def test_scaling_inputs_scales_all_that_is_known_of_them():
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    hessian, largest = rows.T @ rows / 30, np.abs(rows).max(axis=0)
    scales = np.float32([1, 2, 4, 0.5])
    scaled = SiteInputs(hessian, hessian, largest / 2, largest, rows).scaled(scales)
    np.testing.assert_array_equal(scaled.rows, rows / scales)
    np.testing.assert_allclose(scaled.hessian, scaled.rows.T @ scaled.rows / 30, rtol=1e-4)
    np.testing.assert_array_equal(scaled.held_hessian, scaled.hessian)
    np.testing.assert_array_equal(scaled.all_largest, np.abs(scaled.rows).max(axis=0))


@pytest.mark.slow
def test_int8_activations_are_rounded_on_their_way_as_a_server_rounds_them(tiny: TinyDecoder):
    windows = windows_of(random_set({"short": [64]}), bos=None, max_length=640, seed=0)
    layer = tiny.params["layers"][0]
    given = {}
    for activations in ("float", "int8", "int8_static"):
        inputs = LayerInputs(tiny.decoder, LLAMA.sites, activations, windows)
        hidden = inputs.begin(top_of(tiny))
        scales = {site.name: 1e-4 for site in LLAMA.sites}  # static ones that clip all
        given[activations] = inputs.outputs(layer, hidden, scales, kind=0)[0]
    _, rope = tiny.decoder.bind_top(tiny.params).begin(jnp.arange(64), jnp.arange(64))
    run = jax.jit(
        lambda: tiny.decoder.bind_layer(layer)(hidden[0], rope, DenseKV(tiny.decoder.config))
    )
    np.testing.assert_allclose(given["float"], np.asarray(run()), atol=1e-4)
    size = np.abs(given["float"]).max()
    assert 1e-4 < np.abs(given["int8"] - given["float"]).max() / size < 0.05
    assert np.abs(given["int8_static"] - given["float"]).max() / size > 0.1
