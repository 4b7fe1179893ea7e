"""The sites of a family name all of its products, and what scales fold into."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import FAMILIES, decoder_for
from jaxinfer.quantization.sites import LLAMA, SITES, LayerSites
from jaxinfer.quantization.tensors import leaves
from tests.models.tiny_decoder import (
    GEMMA2,
    GEMMA3,
    MIXTRAL,
    OLMO2,
    OLMOE,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)
from tests.tiny import tiny_config

MODELS = (GEMMA2, GEMMA3, OLMO2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE)
IN_FLOATS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


def shapes_of_layer(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in leaves(decoder.float_shapes["layers"][0])}


def test_every_served_architecture_states_its_sites():
    assert set(FAMILIES) <= set(SITES)


@pytest.mark.parametrize(
    ("sites", "changes"),
    [
        (LLAMA, {}),
        *((SITES[model["architectures"][0]], model) for model in MODELS),
    ],
)
def test_each_product_of_a_layer_has_one_site_and_each_fold_fits(
    sites: LayerSites, changes: dict[str, Any]
):
    config = tiny_config(**changes)
    shapes = shapes_of_layer(decoder_for(config, dtype=jnp.dtype("float32")))
    products = [product for site in sites.sites for product in site.products]
    products += [product for product in sites.unseen if f"{product}.weight" in shapes]
    assert sorted(f"{product}.weight" for product in products) == sorted(
        name for name, shape in shapes.items() if len(shape) == 2 and name not in IN_FLOATS
    )
    for site in sites.sites:
        widths = {shapes[f"{product}.weight"][1] for product in site.products}
        assert len(widths) == 1
        if site.fold is None:
            assert not any(name.startswith("input_layernorm") for name in shapes)
            continue
        shared = config["num_attention_heads"] // config["num_key_value_heads"]
        assert (
            shapes[f"{site.fold.module}.weight"][0] * (shared if site.is_by_heads else 1) in widths
        )
