"""From a config.json to a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from checkpoints.formats import Quantization
from jaxinfer.errors import ConfigError
from jaxinfer.models.arithmetic import Arithmetic
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.decoder_top import DecoderTop
from jaxinfer.models.families.gemma2 import GEMMA2
from jaxinfer.models.families.gemma3 import GEMMA3
from jaxinfer.models.families.granite import GRANITE
from jaxinfer.models.families.llama import LLAMA
from jaxinfer.models.families.mistral import MISTRAL
from jaxinfer.models.families.mixtral import MIXTRAL
from jaxinfer.models.families.olmo2 import OLMO2
from jaxinfer.models.families.olmoe import OLMOE
from jaxinfer.models.families.phi3 import PHI3
from jaxinfer.models.families.qwen2 import QWEN2
from jaxinfer.models.families.qwen2_moe import QWEN2_MOE
from jaxinfer.models.families.qwen3 import QWEN3
from jaxinfer.models.families.qwen3_moe import QWEN3_MOE
from jaxinfer.models.families.smollm3 import SMOLLM3
from jaxinfer.models.family import Family
from jaxinfer.models.kernel_limits import check_formats, check_kernels
from pallas_kernels.backend import REFERENCE, Backend

FAMILIES = {
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "GraniteForCausalLM": GRANITE,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "Olmo2ForCausalLM": OLMO2,
    "OlmoeForCausalLM": OLMOE,
    "Phi3ForCausalLM": PHI3,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "SmolLM3ForCausalLM": SMOLLM3,
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Raises: ConfigError for an architecture that is not supported."""
    found = hf_config.get("architectures") or ["none"]
    names = [str(name) for name in found] if isinstance(found, list) else [str(found)]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ConfigError(
            f"config.json: architectures must name one of {', '.join(FAMILIES)}; "
            f"got {', '.join(names):.100}"
        )
    return family


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Raises: ConfigError for an architecture or a key that is not supported."""
    return family_of(hf_config).config(hf_config)


def decoder_for(
    hf_config: Mapping[str, Any],
    *,
    dtype: jnp.dtype,
    backend: Backend = REFERENCE,
    quantization: Quantization | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """The model of a config.json.

    Args:
        dtype: of activations, and of parameters that are not quantized.
        backend: how the operations of its steps are computed.
        quantization: how products, embedding and head keep their weights; None: in dtype.
        max_model_len: tokens of the longest text that will be computed; None: the model's own limit
            (`ModelConfig.serving`).
    Raises: ConfigError for an architecture, a key or a size that is not supported.
    """
    family = family_of(hf_config)
    config = family.config(hf_config).serving(max_model_len)
    check_kernels(config, backend)
    if quantization is not None:
        check_formats(config, quantization, backend)
    arithmetic = Arithmetic(dtype, backend, quantization)
    top, layers, layer_kinds, shapes = _abstract_decoder(family, config, arithmetic)
    *_, float_shapes = _abstract_decoder(family, config, Arithmetic(dtype, backend))
    return Decoder(config, top, layers, layer_kinds, shapes, float_shapes, arithmetic)


def _abstract_decoder(
    family: Family, config: ModelConfig, arithmetic: Arithmetic
) -> tuple[Any, tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
    """The top, the layers that differ, which of them each layer is, and all shapes."""
    top, shapes = _abstract(DecoderTop, config, arithmetic)
    of_layers = [
        (arithmetic.inside(f"layers.{i}"), config.layer_kind(i))
        for i in range(config.num_hidden_layers)
    ]
    kinds = list(dict.fromkeys(of_layers))
    layers, layer_shapes = zip(
        *(_abstract(family.layer, config, *kind) for kind in kinds), strict=True
    )
    layer_kinds = tuple(kinds.index(own) for own in of_layers)
    shapes["layers"] = [layer_shapes[kind] for kind in layer_kinds]
    return top, layers, layer_kinds, shapes


def _abstract(module: Callable[..., nnx.Module], *args: Any) -> tuple[Any, dict[str, Any]]:
    """The module made of `args`, without parameters, and their shapes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(*args)))
    return graph, nnx.to_pure_dict(state)
