"""A whole model to integers, layer by layer, each by what the quantized layers before it give.

Memory: the quantized top, one layer of floats, and what the windows of the calibration set are at
that layer. Writing is the caller's (`add_tensor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy.typing as npt

from checkpoints.certificate import LayerError
from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, quantization_of
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.quantization.calibration_check import check_enough
from jaxinfer.quantization.calibration_set import CalibrationSet
from jaxinfer.quantization.layer_inputs import LayerInputs
from jaxinfer.quantization.layer_quantizer import LayerQuantizer
from jaxinfer.quantization.layer_weights import LayerWeights
from jaxinfer.quantization.outliers import Outliers
from jaxinfer.quantization.recipe import Recipe
from jaxinfer.quantization.sites import SITES, LayerSites
from jaxinfer.quantization.tensors import FloatTensors, leaves, tensor_name
from jaxinfer.quantization.windows import Window, windows_of

AddTensor = Callable[[str, npt.NDArray[Any]], None]  # Hugging Face name, array
OnProgress = Callable[[str, int, int], None]  # what was done last, parts done, parts in all


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was made, beside the tensors."""

    quantization: Quantization
    layer_errors: tuple[LayerError, ...]  # in the order of the model
    outliers: tuple[Outliers, ...]  # of each site
    method: str  # for the certificate


def quantize(
    checkpoint: Checkpoint,
    recipe: Recipe,
    calibration: CalibrationSet,
    *,
    seed: int = 0,
    add_tensor: AddTensor,
    on_progress: OnProgress = lambda name, done, total: None,
) -> Quantized:
    """Hands every tensor of the quantized model to add_tensor, once each.

    Args:
        seed: of what is drawn; the same arguments give the same bytes.
        add_tensor: takes integers and scales, and in float32 what stays float.
    Raises: ConfigError for a model that is not known or a calibration set that is not enough;
        CheckpointError for a model that is quantized already, and for tensors that are missing,
        superfluous or not finite.
    """
    _check_floats(checkpoint)
    sites = sites_of(checkpoint)
    if recipe.migrate_keys and sites.key_rows is None:
        raise ConfigError(
            f"{checkpoint.path}: keys of this architecture are normed after their product, so they "
            "can't be scaled by channel; leave --kv-keys away"
        )
    if recipe.weights.activations == "int8_static":
        if sites.unseen:
            raise ConfigError(
                f"{checkpoint.path}: an expert meets too few tokens of a calibration set for "
                "static scales of its inputs; take --activations int8"
            )
        check_enough(calibration, {})
    decoder = decoder_for(
        checkpoint.config,
        dtype=jnp.dtype("float32"),
        quantization=Quantization(None, recipe.head),
    )
    tensors = FloatTensors(checkpoint, decoder)
    windows = _windows(checkpoint, calibration, decoder, seed)
    inputs = LayerInputs(decoder, sites.sites, recipe.weights.activations, windows)
    num_layers = decoder.config.num_hidden_layers
    total = 1 + sum(_num_products(layer, sites) for layer in decoder.float_shapes["layers"])

    top = tensors.top()
    for name, array in leaves(top):
        add_tensor(tensor_name(name), array)
    on_progress("embed_tokens", 1, total)
    work = LayerQuantizer(recipe, calibration, sites, inputs, decoder, seed)
    hidden = inputs.begin(top)
    del top
    for index, kind in enumerate(decoder.layer_kinds):
        layer = LayerWeights(tensors.layer(index))
        for product in work.products(index, kind, layer, hidden):
            on_progress(product, 1 + len(work.errors), total)
        for name, array in layer.tensors(sites.sites):
            add_tensor(tensor_name(f"layers.{index}.{name}"), array)
        if index + 1 < num_layers:
            hidden = inputs.outputs(layer.params, hidden, layer.x_scales, kind=kind)
    return Quantized(
        Quantization(recipe.weights, recipe.head, tuple(sorted(work.exceptions.items()))),
        tuple(work.errors),
        tuple(work.outliers),
        recipe.description,
    )


def sites_of(checkpoint: Checkpoint) -> LayerSites:
    """Of the checkpoint's architecture. Raises: ConfigError for one whose sites are not stated."""
    names = checkpoint.config.get("architectures") or ["none"]
    found = next((SITES[name] for name in names if name in SITES), None)
    if found is None:
        raise ConfigError(
            f"{checkpoint.path}: quantizing knows {', '.join(SITES)}; got "
            f"{', '.join(map(str, names))}"
        )
    return found


def _num_products(layer: dict[str, Any], sites: LayerSites) -> int:
    """Of a layer's shapes."""
    names = {name for name, _ in leaves(layer)}
    unseen = sum(f"{product}.weight" in names for product in sites.unseen)
    return unseen + sum(len(site.products) for site in sites.sites)


def _check_floats(checkpoint: Checkpoint) -> None:
    if quantization_of(checkpoint.config, str(checkpoint.path)) is not None:
        raise CheckpointError(
            f"{checkpoint.path}: expected a model of floats, found one that is quantized already; "
            "give the model that it was made from"
        )


def _windows(
    checkpoint: Checkpoint, calibration: CalibrationSet, decoder: Decoder, seed: int
) -> list[Window]:
    bos = None
    if checkpoint.add_bos and checkpoint.bos_token is not None:
        bos = checkpoint.tokenizer.token_to_id(checkpoint.bos_token)
    longest = decoder.config.max_position_embeddings
    return windows_of(calibration, bos=bos, max_length=longest, seed=seed)
