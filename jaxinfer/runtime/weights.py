"""A checkpoint's tensors as the parameters of a decoder, on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from checkpoints.checkpoint import Checkpoint
from checkpoints.formats import Quantization, WeightFormat, quantization_of
from checkpoints.load import load_params
from jaxinfer.config import ModelSource
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import Decoder

log = logging.getLogger(__name__)

ON_THE_FLY = {
    "int8": Quantization(WeightFormat(8)),
    "int4": Quantization(WeightFormat(4, 64, has_zero=True)),
}
"""Formats that weights are rounded to while they are loaded, without any data."""
IGNORED_TENSORS = ("*.rotary_emb.inv_freq",)  # recomputed from the configuration
HEAD = "lm_head.weight"


def quantization_for(source: ModelSource, checkpoint: Checkpoint) -> Quantization | None:
    """How the model's weights are kept: as the checkpoint has them, or as the user asks.

    Raises: ConfigError for a quantized checkpoint that is to be quantized otherwise.
    """
    found = quantization_of(checkpoint.config, str(checkpoint.path))
    if found is None:
        return ON_THE_FLY.get(source.quantization)
    if source.quantization != "auto":
        raise ConfigError(
            f"{checkpoint.path} is quantized already; leave quantization at auto "
            f"(--quantization auto), got {source.quantization}"
        )
    return found


def load_weights(
    checkpoint: Checkpoint,
    decoder: Decoder,
    *,
    on_tensor: Callable[[], None] = lambda: None,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Parameters in the decoder's dtype, read one tensor at a time.

    Args:
        on_tensor: called after each; what it raises ends the work, and is raised.
    Raises: CheckpointError for a tensor that is missing, unused or of another shape.
    """
    source = checkpoint.source
    ignored: list[str] = list(IGNORED_TENSORS)
    if decoder.config.tie_word_embeddings and HEAD in source.names():
        log.warning("%s: %s is not used, the embedding is the head", checkpoint.path, HEAD)
        ignored.append(HEAD)
    total = sum(source.info(name).nbytes for name in source.names())
    with tqdm(
        total=total,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=None if show_progress else True,
    ) as bar:

        def advance(num_bytes: int) -> None:
            on_tensor()
            bar.update(num_bytes)

        return load_params(
            source,
            decoder.weight_plan(),
            dtype=decoder.dtype,
            ignore=ignored,
            progress=advance,
            file=str(checkpoint.path),
        )
