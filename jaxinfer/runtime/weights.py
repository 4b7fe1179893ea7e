"""A checkpoint's tensors as the parameters of a decoder, on the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import CONFIG_KEY, Quantization, quantization_of
from checkpoints.load import ParamPath, load_faults, load_params, read_params
from checkpoints.load_product import ProductSpec
from jaxinfer.models.decoder import Decoder

log = logging.getLogger(__name__)

IGNORED_TENSORS = ("*.rotary_emb.inv_freq",)  # recomputed from the configuration
HEAD = "lm_head.weight"
MAX_THREADS = 4  # that convert and round; each holds a tensor


def load_weights(
    checkpoint: Checkpoint,
    decoder: Decoder,
    *,
    on_tensor: Callable[[], None] = lambda: None,
    put: Callable[[np.ndarray], jax.Array] = jax.device_put,
    is_in_background: bool = False,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Parameters in the decoder's dtype, read one tensor at a time.

    Args:
        on_tensor: called after each; what it raises ends the work, and is raised.
        put: host array -> device array.
        is_in_background: on the caller's thread alone, and every number must be finite.
    Raises: CheckpointError for a tensor that is missing, unused or of another shape, and for the
        format of a product that the decoder does not have.
    """
    source = checkpoint.source
    options = _options(checkpoint, decoder)
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
            **options,
            put=put,
            progress=advance,
            num_threads=0 if is_in_background else min(MAX_THREADS, os.cpu_count() or 1),
            must_be_finite=is_in_background,
        )


def each_weight(
    checkpoint: Checkpoint, decoder: Decoder
) -> Generator[tuple[dict[ParamPath, np.ndarray], int]]:
    """The same in the background, on the host: the arrays of a weight by their paths, and its bytes
    in the file.
    """
    return read_params(
        checkpoint.source,
        decoder.weight_plan(),
        **_options(checkpoint, decoder),
        num_threads=0,
        must_be_finite=True,
    )


def weight_faults(checkpoint: Checkpoint, decoder: Decoder) -> list[str]:
    """All that `load_weights` would refuse before it reads a tensor."""
    try:
        options = _options(checkpoint, decoder)
    except CheckpointError as error:
        return [str(error)]
    del options["dtype"]
    return list(load_faults(checkpoint.source, decoder.weight_plan(), **options))


def _options(checkpoint: Checkpoint, decoder: Decoder) -> dict[str, Any]:
    """What reading must know of the two."""
    file = str(checkpoint.path)
    found = quantization_of(checkpoint.config, file)
    if found is not None:
        _check_exceptions(found, decoder, file)
    ignored: list[str] = list(IGNORED_TENSORS)
    if decoder.config.tie_word_embeddings and HEAD in checkpoint.source.names():
        log.warning("%s: %s is not used, the embedding is the head", checkpoint.path, HEAD)
        ignored.append(HEAD)
    return {
        "dtype": decoder.dtype,
        "ignore": ignored,
        "is_quantized": found is not None,
        "file": file,
    }


def _check_exceptions(found: Quantization, decoder: Decoder, file: str) -> None:
    paths = [
        spec.path if isinstance(spec, ProductSpec) else spec.path[:-1]
        for spec in decoder.weight_plan()
        if len(spec.shape) == 2 and spec.path[0] == "layers"
    ]
    products = {".".join(map(str, path)) for path in paths}
    unknown = [name for name, _ in found.exceptions if name not in products]
    if unknown:
        raise CheckpointError(
            f"{file}: expected products of the model in {CONFIG_KEY}'s exceptions, "
            f"found {unknown[0]!r}"
        )
