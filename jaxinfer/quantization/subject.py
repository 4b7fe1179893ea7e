"""A model that is measured: a checkpoint's decoder and parameters, over windows of text.

Opened as the checkpoint has it, or rounded while it is loaded; without pages, buckets or an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, quantization_of
from checkpoints.load_product import PART_DTYPES, ProductSpec
from checkpoints.rounded_version import rounded_version
from jaxinfer.config import KVCacheDtype
from jaxinfer.errors import ConfigError
from jaxinfer.models.attention import DenseKV, QuantizedDenseKV, through_int8
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for, model_config
from jaxinfer.quantization.forward import Forward
from jaxinfer.runtime.memory_plan import default_dtype
from jaxinfer.runtime.steps import Params, without_layers
from jaxinfer.runtime.weight_choice import ON_THE_FLY
from jaxinfer.runtime.weights import load_weights
from jaxinfer.tokenizer import Tokenizer

ROWS = 64  # of logits at a time: with 262,144 tokens 64 MiB


@dataclass(frozen=True)
class Subject:
    """A loaded model under a name."""

    name: str  # as the user gave it
    version: str  # content hash of the checkpoint
    decoder: Decoder
    params: Params
    tokenizer: Tokenizer
    num_bytes: int  # of all tensors as a file has them; of GGUF's, dequantized
    kv_cache: KVCacheDtype = "auto"  # how keys and values are kept

    @property
    def format(self) -> str:
        """For tables, such as int4-g128 or float32."""
        return format_name(self.decoder.arithmetic.quantization, self.decoder.dtype)

    @property
    def bits_per_weight(self) -> float:
        """Scales and what is not quantized included."""
        leaves = jax.tree.leaves(self.decoder.float_shapes)
        return 8 * self.num_bytes / sum(leaf.size for leaf in leaves)

    def round_kv(self, x: jax.Array) -> jax.Array:
        """float[N, K, D] keys or values as they come back from the KV cache."""
        return through_int8(x) if self.kv_cache == "int8" else x

    @cached_property
    def _forward(self) -> Forward:
        return Forward(self.decoder, QuantizedDenseKV if self.kv_cache == "int8" else DenseKV)

    @cached_property
    def _top(self) -> Params:
        return without_layers(self.params)

    def logit_rows(self, token_ids: np.ndarray) -> Iterator[np.ndarray]:
        """int32[T] -> float32[R, V] in order: the head is applied to some rows at a time."""
        *_, hidden = self.after_layers(token_ids)
        for start in range(0, len(hidden), ROWS):
            yield np.asarray(self._forward.end(self._top, hidden[start : start + ROWS]))

    def after_layers(self, token_ids: np.ndarray) -> Iterator[jax.Array]:
        """int32[T] -> what stands after each layer, float[T, E] one by one."""
        x, rope = self._forward.begin(self._top, jnp.asarray(token_ids))
        for layer, kind in zip(self.params["layers"], self.decoder.layer_kinds, strict=True):
            x = self._forward.layers[kind](layer, x, rope)
            yield x


def open_subject(
    checkpoint: Checkpoint,
    name: str,
    *,
    tokenizer: Tokenizer,
    dtype: str = "auto",
    rounded_to: str | None = None,
    kv_cache: KVCacheDtype = "auto",
    show_progress: bool = False,
) -> Subject:
    """Reads a checkpoint's weights, quantized ones as they are.

    Args:
        dtype: of what is not quantized; auto, float32 or bfloat16.
        rounded_to: a name of `ON_THE_FLY` that float weights are rounded to; None: none.
    Raises: CheckpointError; ConfigError for quantized weights that are to be rounded.
    """
    found = quantization_of(checkpoint.config, str(checkpoint.path))
    version = checkpoint.version
    if rounded_to is not None:
        if found is not None:
            raise ConfigError(f"{name} is quantized already; it can't be rounded to {rounded_to}")
        found = ON_THE_FLY[rounded_to]
        version = rounded_version(version, found)
    try:
        decoder = decoder_for(checkpoint.config, dtype=default_dtype(dtype), quantization=found)
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    params = load_weights(checkpoint, decoder, show_progress=show_progress)
    source = checkpoint.source
    in_file = sum(source.info(tensor).nbytes for tensor in source.names())
    size = in_file if rounded_to is None else packed_bytes(decoder)
    return Subject(name, version, decoder, params, tokenizer, size, kv_cache)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's own. Raises: CheckpointError."""
    try:
        return Tokenizer.of(checkpoint)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def context_length(checkpoint: Checkpoint) -> int:
    """Tokens that the model can see. Raises: CheckpointError."""
    try:
        return model_config(checkpoint.config).max_position_embeddings
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def packed_bytes(decoder: Decoder) -> int:
    """Of the decoder's tensors in a file, where they are floats in its dtype."""
    total = 0
    for spec in decoder.weight_plan():
        if isinstance(spec, ProductSpec):
            shapes = spec.part_shapes().items()
            total += sum(
                int(np.prod(shape)) * np.dtype(PART_DTYPES[part]).itemsize for part, shape in shapes
            )
        else:
            total += int(np.prod(spec.shape)) * decoder.dtype.itemsize
    return total


def format_name(quantization: Quantization | None, dtype: jnp.dtype) -> str:
    """Of most products, and of embedding and head where it is another."""
    if quantization is None:
        return dtype.name
    weights = dtype.name if quantization.weights is None else quantization.weights.name
    head = dtype.name if quantization.head is None else quantization.head.name
    mixed = f", {len(quantization.exceptions)} exceptions" if quantization.exceptions else ""
    return weights + ("" if head == weights else f", head {head}") + mixed
