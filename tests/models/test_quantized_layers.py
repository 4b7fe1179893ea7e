"""A decoder whose layers keep their weights in 8 or 4 bits computes with exactly those weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.arithmetic import WeightFormat
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.registry import Decoder, decoder_for
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.int4_matmul import pack_int4
from tests.models.reference_decoder import ReferenceDecoder
from tests.tiny import tiny_config, tiny_tensors

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # multiples of the groups
INTERPRET = Backend("interpret")
FLOAT32 = jnp.dtype("float32")


def rounded(weight: np.ndarray, weights: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """float[out, in] -> integers int8[out, in], scales float32[groups, out]: to the nearest."""
    largest = 2 ** (weights.bits - 1) - 1
    groups = weight.reshape(len(weight), -1, weights.group_size or weight.shape[1])
    scale = (np.abs(groups).max(axis=2) / largest).astype(np.float32)
    return np.rint(groups / scale[..., None]).astype(np.int8).reshape(weight.shape), scale.T


def quantized(
    tensors: dict[str, np.ndarray], decoder: Decoder, weights: WeightFormat
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The decoder's parameters, and a checkpoint of what they stand for."""
    params: dict[str, Any] = {
        "embed_tokens": {"weight": tensors["model.embed_tokens.weight"]},
        "norm": {"weight": tensors["model.norm.weight"]},
        "layers": [{} for _ in decoder.param_shapes["layers"]],
    }
    meant = dict(tensors)
    for name, value in tensors.items():
        match name.removesuffix(".weight").split("."):
            case ["model", "layers", layer, part, product]:
                q, scale = rounded(value, weights)
                group_size = value.shape[1] // len(scale)
                meant[name] = q * np.repeat(scale.T, group_size, axis=1).astype(np.float64)
                if weights.bits == 4:
                    q = np.asarray(pack_int4(jnp.asarray(q), group_size))
                params["layers"][int(layer)].setdefault(part, {})[product] = {
                    "q": q,
                    "scale": scale,
                }
            case ["model", "layers", layer, norm]:
                params["layers"][int(layer)][norm] = {"weight": value}
            case _:
                pass
    return params, meant


@pytest.mark.parametrize(
    ("weights", "backend"),
    [
        pytest.param(WeightFormat(8), INTERPRET, marks=pytest.mark.slow),
        (WeightFormat(8, 32), INTERPRET),
        (WeightFormat(4, 32), INTERPRET),
        (WeightFormat(4, 32), REFERENCE),
    ],
    ids=str,
)
def test_logits_are_those_of_the_dequantized_weights(weights: WeightFormat, backend: Backend):
    config = tiny_config(**SIZES)
    decoder = decoder_for(config, dtype=FLOAT32, backend=backend, weights=weights)
    params, meant = quantized(tiny_tensors(config), decoder, weights)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, decoder.param_shapes)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 9).tolist()

    @jax.jit
    def run(params: dict[str, Any], ids: jax.Array) -> jax.Array:
        caches = [DenseKV(decoder.config) for _ in params["layers"]]
        return decoder.run_dense(params, ids, caches)

    got = np.asarray(run(params, np.array(ids, np.int32)))
    want = ReferenceDecoder(config, meant).logits(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * want.std())


def test_four_bits_take_half_of_eight():
    def num_bytes(weights: WeightFormat) -> int:
        layer = decoder_for(tiny_config(**SIZES), dtype=FLOAT32, weights=weights).param_shapes
        return layer["layers"][0]["mlp"]["up_proj"]["q"].size

    assert num_bytes(WeightFormat(4, 32)) * 2 == num_bytes(WeightFormat(8, 32))


@pytest.mark.parametrize(("bits", "group_size"), [(8, 48), (4, None), (4, 16), (8, 0)])
def test_a_group_that_no_kernel_has_is_refused(bits: Any, group_size: int | None):
    with pytest.raises(ValueError, match=f"group_size of {bits}-bit .* got {group_size}"):
        WeightFormat(bits, group_size)
