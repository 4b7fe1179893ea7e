"""A decoder whose layers keep their weights in 8 or 4 bits computes with exactly those weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.formats import Quantization, WeightFormat
from checkpoints.load import load_params
from checkpoints.load_product import ProductSpec
from checkpoints.rounding import round_to_nearest
from checkpoints.source import TensorInfo
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.registry import Decoder, decoder_for
from pallas_kernels.backend import REFERENCE, Backend
from tests.models.reference_decoder import ReferenceDecoder
from tests.tiny import tiny_config, tiny_tensors

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # multiples of the groups
INTERPRET = Backend("interpret")
FLOAT32 = jnp.dtype("float32")


def quantized(
    tensors: dict[str, np.ndarray], decoder: Decoder
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The decoder's parameters, and a checkpoint of what they stand for."""
    params = load_params(Held(tensors), decoder.weight_plan(), dtype=np.float32, file="tensors")
    meant = dict(tensors)
    for spec in decoder.weight_plan():
        if isinstance(spec, ProductSpec):
            name = f"{spec.names[0]}.weight"
            meant[name] = round_to_nearest(tensors[name], spec.kept).dequantized()
    return params, meant


class Held:
    """A `TensorSource` over arrays."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        return TensorInfo(name, tensor.shape, tensor.dtype, tensor.nbytes)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        return self._tensors[name][slices or ()]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("weights", "backend"),
    [
        pytest.param(WeightFormat(8), INTERPRET, marks=pytest.mark.slow),
        (WeightFormat(8), REFERENCE),
        (WeightFormat(8, 64, has_zero=True), REFERENCE),
        (WeightFormat(4, 64, has_zero=True), REFERENCE),
        (WeightFormat(8, 32), INTERPRET),
        (WeightFormat(4, 32), INTERPRET),
        (WeightFormat(4, 32), REFERENCE),
    ],
    ids=str,
)
def test_logits_are_those_of_the_dequantized_weights(weights: WeightFormat, backend: Backend):
    config = tiny_config(**SIZES)
    quantization = Quantization(weights)
    decoder = decoder_for(config, dtype=FLOAT32, backend=backend, quantization=quantization)
    params, meant = quantized(tiny_tensors(config), decoder)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, decoder.param_shapes)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 9).tolist()

    @jax.jit
    def run(params: dict[str, Any], ids: jax.Array) -> jax.Array:
        caches = [DenseKV(decoder.config) for _ in params["layers"]]
        return decoder.run_dense(params, ids, caches)

    got = np.asarray(run(params, np.array(ids, np.int32)))
    want = ReferenceDecoder(config, meant).logits(ids)
    kept = 2e-4 if backend.form == "interpret" else 2e-3  # integer products keep 15 bits of a row
    np.testing.assert_allclose(got, want, rtol=0, atol=kept * want.std())


def test_four_bits_take_half_of_eight():
    def num_bytes(weights: WeightFormat) -> int:
        decoder = decoder_for(
            tiny_config(**SIZES),
            dtype=FLOAT32,
            backend=INTERPRET,
            quantization=Quantization(weights),
        )
        return decoder.param_shapes["layers"][0]["mlp"]["up_proj"]["q"].size

    assert num_bytes(WeightFormat(4, 32)) * 2 == num_bytes(WeightFormat(8, 32))


@pytest.mark.parametrize(("bits", "group_size"), [(8, 48), (4, 16), (8, 0)])
def test_a_group_that_no_kernel_has_is_refused(bits: Any, group_size: int | None):
    with pytest.raises(ValueError, match=f"group_size must .* got {group_size}"):
        WeightFormat(bits, group_size)


def test_a_layer_kept_otherwise_is_a_kind_of_its_own():
    config = tiny_config(**SIZES, num_hidden_layers=3)
    exceptions = (("layers.1.mlp.down_proj", WeightFormat(8)),)
    quantization = Quantization(WeightFormat(4, 32), exceptions=exceptions)
    decoder = decoder_for(config, dtype=FLOAT32, backend=INTERPRET, quantization=quantization)
    assert decoder.layer_kinds == (0, 1, 0)
    widths = [layer["mlp"]["down_proj"]["q"].shape[1] for layer in decoder.param_shapes["layers"]]
    assert widths == [48, 96, 48]
