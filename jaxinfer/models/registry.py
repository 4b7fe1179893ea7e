"""From a config.json to a decoder and its weight plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.load import WeightSpec
from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.llama import LlamaModel

FAMILIES: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model without weights: what it is, and which parameters it takes."""

    config: ModelConfig
    graph: nnx.GraphDef[LlamaModel]  # static: bind(params) makes the callable model
    param_shapes: dict[str, Any]  # nested dict of ShapeDtypeStruct, list indices as int keys
    dtype: jnp.dtype  # of the parameters and of the activations

    def bind(self, params: dict[str, Any]) -> LlamaModel:
        """The model with `params` (nested dicts and lists), for use while tracing."""
        return nnx.merge(self.graph, _keyed(params))

    def weight_plan(self) -> list[WeightSpec]:
        """Which tensor of a Hugging Face checkpoint fills each parameter.

        Attribute names mirror the checkpoint, so the tree is the plan: layers/3/mlp/up_proj/weight
        is `model.layers.3.mlp.up_proj.weight`; only the head stands outside `model.`.
        """
        leaves = jax.tree_util.tree_leaves_with_path(self.param_shapes)
        return [_spec(tuple(key.key for key in path), leaf.shape) for path, leaf in leaves]


def _spec(path: tuple[str | int, ...], shape: tuple[int, ...]) -> WeightSpec:
    dotted = ".".join(map(str, path))
    names = (dotted,) if path[0] == "lm_head" else (f"model.{dotted}", dotted)
    return WeightSpec(path=path, names=names, shape=shape)


def _keyed(tree: Any) -> Any:
    """Lists become dicts with int keys, which is how Flax spells them."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    return {key: _keyed(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def decoder_for(hf_config: Mapping[str, Any], *, dtype: jnp.dtype) -> Decoder:
    """Raises ConfigError for an architecture or a key that is not supported."""
    names = hf_config.get("architectures") or ["none"]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ConfigError(
            f"config.json: architectures must name one of {', '.join(FAMILIES)}; "
            f"got {', '.join(map(str, names))}"
        )
    config = ModelConfig.from_hf(hf_config)
    graph, state = nnx.split(nnx.eval_shape(lambda: family(config, dtype=dtype)))
    return Decoder(config, graph, nnx.to_pure_dict(state), dtype)
