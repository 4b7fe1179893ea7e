"""A decoder whose layers keep their weights in 8 or 4 bits computes with exactly those weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.tiny_model import quantized_tensors
from checkpoints.formats import Quantization, WeightFormat
from checkpoints.load import load_params
from checkpoints.load_product import ProductSpec
from checkpoints.rounding import round_to_nearest
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from pallas_kernels.backend import REFERENCE, Backend
from tests.held_tensors import Held
from tests.models.reference_decoder import ReferenceDecoder
from tests.tiny import tiny_config, tiny_tensors

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # multiples of the groups
TAILS = {"hidden_size": 48, "intermediate_size": 85}  # groups that are not full, and an odd width
INTERPRET = Backend("interpret")
FLOAT32 = jnp.dtype("float32")
MIXED = Quantization(
    WeightFormat(4, 32, has_zero=True),
    exceptions=(
        ("layers.0.mlp.down_proj", WeightFormat(8)),
        ("layers.0.self_attn.k_proj", None),
        ("layers.1.mlp.gate_proj", WeightFormat(8, 64)),
        ("layers.1.self_attn.o_proj", WeightFormat(8, activations="int8")),
    ),
)


def meant(tensors: dict[str, np.ndarray], decoder: Decoder) -> dict[str, np.ndarray]:
    """A float checkpoint of what the quantized one stands for."""
    found = dict(tensors)
    for spec in decoder.weight_plan():
        if isinstance(spec, ProductSpec):
            name = f"{spec.names[0]}.weight"
            found[name] = round_to_nearest(tensors[name], spec.kept).dequantized()
    return found


def logits(decoder: Decoder, tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    params = load_params(Held(tensors), decoder.weight_plan(), dtype=np.float32, file="tensors")
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, decoder.param_shapes)
    assert decoder.params_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    @jax.jit
    def run(params: dict[str, Any], ids: jax.Array) -> jax.Array:
        caches = [DenseKV(decoder.config) for _ in params["layers"]]
        return decoder.run_dense(params, ids, caches)

    return np.asarray(run(params, np.array(ids, np.int32)))


FLOAT_ROWS = 2e-4, 2e-3  # of the spread of logits: kernels; integer products keep 15 bits of a row
BYTE_ROWS = 0.1, 0.1


@pytest.mark.parametrize(
    ("quantization", "sizes", "backend", "kept"),
    [
        (WeightFormat(8), SIZES, REFERENCE, FLOAT_ROWS),
        (WeightFormat(8, 64, has_zero=True), TAILS, REFERENCE, FLOAT_ROWS),
        (WeightFormat(4, 64, has_zero=True), TAILS, REFERENCE, FLOAT_ROWS),
        (MIXED, TAILS, REFERENCE, BYTE_ROWS),
        (MIXED, TAILS, INTERPRET, BYTE_ROWS),
        *(
            pytest.param(weights, TAILS, INTERPRET, FLOAT_ROWS, marks=pytest.mark.slow)
            for weights in (WeightFormat(8), WeightFormat(8, 32, has_zero=True), WeightFormat(4))
        ),
    ],
    ids=lambda value: value.name if isinstance(value, WeightFormat) else None,
)
def test_logits_are_those_of_the_dequantized_weights(
    quantization: Quantization | WeightFormat,
    sizes: dict[str, int],
    backend: Backend,
    kept: tuple[float, float],
):
    if isinstance(quantization, WeightFormat):
        quantization = Quantization(quantization)
    config = tiny_config(**sizes)
    decoder = decoder_for(config, dtype=FLOAT32, backend=backend, quantization=quantization)
    tensors = tiny_tensors(config)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 9).tolist()
    got = logits(decoder, quantized_tensors(tensors, quantization), ids)
    want = ReferenceDecoder(config, meant(tensors, decoder)).logits(ids)
    limit = kept[backend.form == "reference"] * want.std()
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)


@pytest.mark.parametrize("backend", [REFERENCE, INTERPRET], ids=lambda backend: backend.form)
@pytest.mark.parametrize("weights", [WeightFormat(8, 32, has_zero=True), WeightFormat(4)], ids=str)
def test_weights_rounded_while_loading_are_those_of_a_quantized_checkpoint(
    weights: WeightFormat, backend: Backend
):
    config, quantization = tiny_config(**TAILS), Quantization(weights)
    decoder = decoder_for(config, dtype=FLOAT32, backend=backend, quantization=quantization)
    tensors = tiny_tensors(config)
    rounded, read = (
        load_params(Held(source), decoder.weight_plan(), dtype=np.float32, file="tensors")
        for source in (tensors, quantized_tensors(tensors, quantization))
    )
    jax.tree.map(np.testing.assert_array_equal, rounded, read)


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
