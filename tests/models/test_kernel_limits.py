"""A model that no kernel takes is refused before anything is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from checkpoints.formats import HEAD_FORMAT, Quantization, WeightFormat
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import decoder_for
from pallas_kernels.backend import REFERENCE, Backend
from tests.models.tiny_decoder import QWEN3_MOE
from tests.tiny import tiny_config

FLOAT32 = jnp.dtype("float32")
TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 258}, "head_dim up to 256; got 258"),
    (
        {"num_attention_heads": 33, "num_key_value_heads": 1},
        "query heads per KV head up to 32; got 33",
    ),
    ({"hidden_size": 16386}, "hidden_size up to 16384; got 16386"),
    (
        {"num_attention_heads": 130, "num_key_value_heads": 65, "head_dim": 256},
        "up to 16384; got 32768",
    ),
]


@pytest.mark.parametrize(("changes", "message"), TOO_LARGE)
@pytest.mark.parametrize("form", ["pallas", "interpret"])
def test_a_size_beyond_the_kernels_is_refused_by_name(
    form: Any, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=f"{message}: take --kernel-backend reference"):
        decoder_for(tiny_config(**changes), dtype=FLOAT32, backend=Backend(form))


@pytest.mark.parametrize(("changes", "_message"), TOO_LARGE)
def test_the_reference_form_takes_it(changes: dict[str, Any], _message: str):
    decoder_for(tiny_config(**changes), dtype=FLOAT32, backend=REFERENCE)


def test_the_largest_sizes_are_taken():
    largest = {
        "head_dim": 256,
        "num_attention_heads": 64,
        "num_key_value_heads": 2,
        "hidden_size": 16384,
    }
    decoder_for(tiny_config(**largest), dtype=FLOAT32, backend=Backend("pallas"))


DEEP, DEEPER = {"intermediate_size": 65536}, {"intermediate_size": 131072}
LARGE = {"num_experts": 512, "hidden_size": 2048, "moe_intermediate_size": 2048}
BYTES = WeightFormat(8, activations="int8")


@pytest.mark.parametrize(
    ("changes", "weights", "form", "message"),
    [
        (DEEPER, BYTES, "pallas", "int8-a8 add up at most 131071 inputs; got 131072"),
        (DEEPER, WeightFormat(8), "reference", "int8 add up at most 131071 inputs; got 131072"),
        (DEEP, WeightFormat(8, has_zero=True), "reference", "at most 65535 inputs; got 65536"),
        ({"vocab_size": 2**26}, None, "pallas", "vocab_size times hidden_size is 3221225472"),
        (QWEN3_MOE, WeightFormat(4, 32, has_order=True), "reference", "got int4-g32-order"),
    ],
)
def test_a_format_whose_products_would_be_wrong_is_refused(
    changes: dict[str, int], weights: WeightFormat | None, form: Any, message: str
):
    quantization = Quantization(weights)
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        decoder_for(
            tiny_config(**changes),
            dtype=FLOAT32,
            backend=Backend(form),
            quantization=quantization,
        )


@pytest.mark.parametrize(
    ("changes", "weights", "form"),
    [
        (DEEPER, WeightFormat(8), "pallas"),
        (DEEPER, WeightFormat(8, 128), "reference"),
        (DEEPER, WeightFormat(4), "reference"),
        (DEEP, BYTES, "pallas"),
        ({"vocab_size": 2**26}, None, "reference"),
    ],
)
def test_a_format_whose_sums_fit_is_taken(
    changes: dict[str, int], weights: WeightFormat | None, form: Any
):
    quantization = Quantization(weights)
    decoder_for(
        tiny_config(**changes), dtype=FLOAT32, backend=Backend(form), quantization=quantization
    )


def test_an_exception_is_looked_at_too():
    exceptions = (("layers.1.mlp.down_proj", BYTES),)
    with pytest.raises(ConfigError, match="int8-a8 add up at most 131071 inputs"):
        decoder_for(
            tiny_config(**DEEPER),
            dtype=FLOAT32,
            backend=Backend("pallas"),
            quantization=Quantization(WeightFormat(4, 128), exceptions=exceptions),
        )


@pytest.mark.parametrize(
    ("weights", "exceptions", "message"),
    [
        (WeightFormat(8), {}, r"layers.0.mlp.experts.gate_proj in int8 has 2147483648: .* bits"),
        (
            WeightFormat(4, 128),
            {"layers.1.mlp.experts.down_proj": WeightFormat(8, 128)},
            "layers.1.mlp.experts.down_proj in int8-g128 has 2147483648: quantize with other bits",
        ),
    ],
)
def test_a_layers_experts_are_one_weight(
    weights: WeightFormat, exceptions: dict[str, WeightFormat], message: str
):
    """Of 2 GiB in bytes; half of that is taken."""
    config = tiny_config(**QWEN3_MOE | LARGE)
    build = partial(decoder_for, config, dtype=FLOAT32, backend=Backend("pallas"))
    with pytest.raises(ConfigError, match=message):
        build(quantization=Quantization(weights, exceptions=tuple(exceptions.items())))
    build(quantization=Quantization(WeightFormat(4, 128)))


@pytest.mark.parametrize("head", [WeightFormat(4), WeightFormat(8, 32), BYTES])
def test_a_head_in_another_format_is_refused(head: WeightFormat):
    with pytest.raises(ConfigError, match=f"may be kept as int8 or not quantized; got {head.name}"):
        decoder_for(tiny_config(), dtype=FLOAT32, quantization=Quantization(None, head))


def test_a_head_of_bytes_or_floats_is_taken():
    for head in (HEAD_FORMAT, None):
        decoder_for(tiny_config(), dtype=FLOAT32, quantization=Quantization(None, head))
