"""A config.json makes a decoder, and its parameter tree is the plan for loading."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from checkpoints.layout import arranged
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import FAMILIES, decoder_for
from tests.held_tensors import Held
from tests.models.tiny_decoder import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from tests.tiny import tiny_config, tiny_tensors

FLOAT32 = jnp.dtype("float32")


def tiny_decoder(**changes: Any) -> Decoder:
    return decoder_for(tiny_config(**changes), dtype=FLOAT32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"mlp_bias": True},
        QWEN2,
        MISTRAL,
        QWEN3,
        SMOLLM3,
        GRANITE,
        OLMO2,
        PHI3,
        GEMMA2,
        GEMMA3,
    ],
)
def test_every_parameter_has_one_tensor_and_every_tensor_one_parameter(changes: dict[str, Any]):
    decoder, config = tiny_decoder(**changes), tiny_config(**changes)
    plan = decoder.weight_plan()
    source = arranged(Held(tiny_tensors(config)), config, "tensors")
    shapes = {name: source.info(name).shape for name in source.names()}
    assert {spec.names[0]: spec.shape for spec in plan} == shapes
    paths = [spec.path for spec in plan]
    assert len(paths) == len(set(paths)) == len(jax.tree.leaves(decoder.param_shapes))


def test_a_spec_leads_to_its_parameter():
    decoder = tiny_decoder()
    for spec in decoder.weight_plan():
        leaf: Any = decoder.param_shapes
        for key in spec.path:
            leaf = leaf[key]
        assert (leaf.shape, leaf.dtype) == (spec.shape, FLOAT32)


def test_the_body_is_found_with_and_without_its_prefix_and_the_head_beside_it():
    plan = {spec.path: spec.names for spec in tiny_decoder(tie_word_embeddings=False).weight_plan()}
    assert plan["layers", 1, "mlp", "up_proj", "weight"] == (
        "model.layers.1.mlp.up_proj.weight",
        "layers.1.mlp.up_proj.weight",
    )
    assert plan["lm_head", "weight"] == ("lm_head.weight",)


def test_a_tied_decoder_has_no_head_of_its_own():
    assert "lm_head" not in tiny_decoder().param_shapes
    assert "lm_head" in tiny_decoder(tie_word_embeddings=False).param_shapes


def test_making_a_decoder_allocates_nothing():
    """70 billion parameters in shapes only."""
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    decoder = tiny_decoder(**big, **heads, vocab_size=128256, tie_word_embeddings=False)
    leaves = jax.tree.leaves(decoder.param_shapes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == 70_553_706_496


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], ["A", "B"], [], None, [None]])
def test_an_architecture_that_is_not_supported_is_refused_by_name(names: Any):
    shown = ", ".join(map(str, names or ["none"]))
    with pytest.raises(ConfigError) as caught:
        tiny_decoder(architectures=names)
    assert str(caught.value) == (
        f"config.json: architectures must name one of {', '.join(FAMILIES)}; got {shown}"
    )


def test_one_supported_architecture_among_others_is_enough():
    names = ["SomethingElse", "LlamaForCausalLM"]
    assert tiny_decoder(architectures=names).config == tiny_decoder().config
