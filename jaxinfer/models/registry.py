"""From a config.json to a decoder and its weight plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import SequenceKey

from checkpoints.formats import Quantization, WeightFormat
from checkpoints.load import WeightSpec
from checkpoints.load_product import ProductSpec
from jaxinfer.errors import ConfigError
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.gemma3 import Gemma3Layer, Gemma3Top
from jaxinfer.models.kernel_limits import check_formats, check_kernels
from jaxinfer.models.llama import LlamaLayer, LlamaTop
from pallas_kernels.backend import REFERENCE, Backend

Top = LlamaTop | Gemma3Top
Layer = LlamaLayer | Gemma3Layer


@dataclass(frozen=True, slots=True)
class Family:
    """The modules of a decoder family.

    top: takes (config, arithmetic).
    layer: takes (config, arithmetic, layer type).
    """

    top: type[Top]
    layer: type[Layer]


LLAMA = Family(LlamaTop, LlamaLayer)
FAMILIES = {
    "Gemma3ForCausalLM": Family(Gemma3Top, Gemma3Layer),
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
}


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

    def bind_top(self, params: dict[str, Any]) -> Top:
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
        kept = self._format_of(path) if len(shape) == 2 else None
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


def decoder_for(
    hf_config: Mapping[str, Any],
    *,
    dtype: jnp.dtype,
    backend: Backend = REFERENCE,
    quantization: Quantization | None = None,
) -> Decoder:
    """The model of a config.json.

    Args:
        dtype: of activations, and of parameters that are not quantized.
        backend: how the operations of its steps are computed.
        quantization: how products, embedding and head keep their weights; None: in dtype.
    Raises: ConfigError for an architecture, a key or a size that is not supported.
    """
    names = hf_config.get("architectures") or ["none"]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ConfigError(
            f"config.json: architectures must name one of {', '.join(FAMILIES)}; "
            f"got {', '.join(map(str, names))}"
        )
    config = ModelConfig.from_hf(hf_config)
    check_kernels(config, backend)
    if quantization is not None:
        check_formats(config, quantization, backend)
    arithmetic = Arithmetic(dtype, backend, quantization)
    top, shapes = _abstract(family.top, config, arithmetic)
    of_layers = [
        (arithmetic.inside(f"layers.{i}"), config.layer_type(i))
        for i in range(config.num_hidden_layers)
    ]
    kinds = list(dict.fromkeys(of_layers))
    layers, layer_shapes = zip(
        *(_abstract(family.layer, config, *kind) for kind in kinds), strict=True
    )
    layer_kinds = tuple(kinds.index(own) for own in of_layers)
    return Decoder(
        config,
        top,
        layers,
        layer_kinds,
        shapes | {"layers": [layer_shapes[kind] for kind in layer_kinds]},
        _float_shapes(family, config, Arithmetic(dtype, backend)),
        arithmetic,
    )


def _float_shapes(family: Family, config: ModelConfig, arithmetic: Arithmetic) -> dict[str, Any]:
    _, top = _abstract(family.top, config, arithmetic)
    _, layer = _abstract(family.layer, config, arithmetic, config.layer_type(0))
    return top | {"layers": [layer] * config.num_hidden_layers}


def _abstract(module: Callable[..., nnx.Module], *args: Any) -> tuple[Any, dict[str, Any]]:
    """The module made of `args`, without parameters, and their shapes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(*args)))
    return graph, nnx.to_pure_dict(state)
