"""A model without weights, and which tensor of a checkpoint fills each of its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import SequenceKey

from checkpoints.formats import WeightFormat
from checkpoints.load import WeightSpec
from checkpoints.load_product import ProductSpec
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder_top import DecoderTop


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model without weights: what it is, and which parameters it takes.

    Parameters are nested dicts: those of the top, and `layers`, a list with one dict per layer.
    """

    config: ModelConfig
    top: nnx.GraphDef[Any]  # static: bound to parameters, it is the callable module
    layers: tuple[nnx.GraphDef[Any], ...]  # those that differ in formats of weights or in type
    layer_kinds: tuple[int, ...]  # of each layer: its place in `layers`
    param_shapes: dict[str, Any]  # of ShapeDtypeStruct
    float_shapes: dict[str, Any]  # the same of the model that is not quantized
    arithmetic: Arithmetic

    @property
    def dtype(self) -> jnp.dtype:
        """Of the activations, and of parameters that are not quantized."""
        return self.arithmetic.dtype

    @property
    def params_bytes(self) -> int:
        leaves = jax.tree.leaves(self.param_shapes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def shares_programs_with(self, other: Decoder) -> bool:
        """Whether the same programs compute both: they differ in weights at most, and in how long
        a text may be.
        """
        length = other.config.max_position_embeddings
        return (
            replace(self.config, max_position_embeddings=length) == other.config
            and self.arithmetic == other.arithmetic
            and (self.layers, self.layer_kinds) == (other.layers, other.layer_kinds)
            and self.param_shapes == other.param_shapes
        )

    def bind_top(self, params: dict[str, Any]) -> DecoderTop:
        """Embedding, last norm and head, for use while tracing; `layers` in params is ignored."""
        return nnx.merge(self.top, {k: v for k, v in params.items() if k != "layers"})

    def bind_layer(self, params: dict[str, Any], kind: int = 0) -> Any:
        """One layer, for use while tracing; kind: of `layer_kinds`."""
        return nnx.merge(self.layers[kind], params)

    def run_dense(
        self, params: dict[str, Any], token_ids: jax.Array, caches: list[DenseKV], start: int = 0
    ) -> jax.Array:
        """int32[T] at positions start.. of one sequence -> float32[T, V], without pages.

        The plain form of the model, for tests and research; `caches` holds one DenseKV per layer.
        """
        top = self.bind_top(params)
        positions = start + jnp.arange(len(token_ids), dtype=jnp.int32)
        x, rope = top.begin(token_ids, positions)
        for layer, kind, cache in zip(params["layers"], self.layer_kinds, caches, strict=True):
            x = self.bind_layer(layer, kind)(x, rope, cache)
        return top.logits(top.norm(x))

    def weight_plan(self) -> list[WeightSpec | ProductSpec]:
        """Which tensor of a Hugging Face checkpoint fills each parameter.

        Attribute names mirror the checkpoint, so the tree is the plan: layers/3/mlp/up_proj/weight
        is `model.layers.3.mlp.up_proj.weight`; only the head stands outside `model.`.
        """
        leaves = jax.tree_util.tree_leaves_with_path(self.float_shapes)
        return [self._spec(keys, leaf.shape) for keys, leaf in leaves]

    def _spec(self, keys: tuple[Any, ...], shape: tuple[int, ...]) -> WeightSpec | ProductSpec:
        path = tuple(key.idx if isinstance(key, SequenceKey) else key.key for key in keys)
        holder: Any = self.param_shapes
        for key in path[:-1]:
            holder = holder[key]
        kept = None if path[-1] in holder else self._format_of(path)
        if kept is None:
            return WeightSpec(path, _names(path), shape)
        unpacked = self.arithmetic.is_unpacked
        return ProductSpec(path[:-1], _names(path[:-1]), (shape[0], shape[1]), kept, unpacked)

    def _format_of(self, path: tuple[str | int, ...]) -> WeightFormat | None:
        """How the weight at `path` is kept; None: in dtype."""
        if path[0] != "layers":
            return self.arithmetic.head_format
        return self.arithmetic.format_of(".".join(map(str, path[:-1])))


def _names(path: tuple[str | int, ...]) -> tuple[str, ...]:
    dotted = ".".join(map(str, path))
    return (dotted,) if path[0] == "lm_head" else (f"model.{dotted}", dotted)
