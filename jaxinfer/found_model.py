"""A model that was found: its files opened, its form chosen, nothing of its weights read.

What a start, a new version and a second engine begin with. Imports the device half.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.resolve import resolve
from jaxinfer.chat_template import ChatTemplate
from jaxinfer.config import ModelSource
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.memory_plan import default_dtype
from jaxinfer.runtime.weight_choice import WeightChoice, choose_weights
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.versions import ModelVersion
from pallas_kernels.backend import Backend


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Close its checkpoint when the weights have been read."""

    checkpoint: Checkpoint
    choice: WeightChoice
    decoder: Decoder
    tokenizer: Tokenizer

    @property
    def version(self) -> str:
        """Of the weights as they will be kept."""
        return self.choice.version

    @property
    def model_version(self) -> ModelVersion:
        ends = frozenset(self.checkpoint.eos_token_ids)
        return ModelVersion(self.version, self.tokenizer, ends)


def find_model(
    source: ModelSource,
    backend: Backend,
    cache_dir: Path,
    *,
    max_model_len: int | None,
    show_progress: bool,
    is_mapped: bool = True,
) -> FoundModel:
    """May download it.

    Args:
        backend: how the operations of its steps are computed.
        cache_dir: jaxinfer's; models that are fetched go there.
        max_model_len: as in `SchedulerConfig`.
        is_mapped: as in `open_checkpoint`.
    Raises: CheckpointError for files that do not fit, ConfigError for settings that cannot work.
    """
    path = resolve(
        source.model,
        revision=source.revision,
        download_dir=source.download_dir,
        cache_dir=cache_dir,
        show_progress=show_progress,
    )
    checkpoint = open_checkpoint(path, is_mapped=is_mapped)
    try:
        return _understood(source, checkpoint, backend, max_model_len)
    except BaseException:
        checkpoint.close()
        raise


def _understood(
    source: ModelSource, checkpoint: Checkpoint, backend: Backend, max_model_len: int | None
) -> FoundModel:
    template = _chat_template(source)
    dtype = default_dtype(source.dtype)
    choice = choose(source, checkpoint, dtype, backend)
    with faults_of(checkpoint.path):
        decoder = decoder_for(
            checkpoint.config,
            dtype=dtype,
            backend=backend,
            quantization=choice.quantization,
            max_model_len=max_model_len,
        )
        return FoundModel(checkpoint, choice, decoder, Tokenizer.of(checkpoint, template))


def choose(
    source: ModelSource, checkpoint: Checkpoint, dtype: jnp.dtype, backend: Backend
) -> WeightChoice:
    """As `choose_weights`, for this process's device."""
    is_measured = dtype == jnp.float32  # as certificates are
    is_fast = jax.devices()[0].platform == "cpu" and backend.form == "reference"
    return choose_weights(source, checkpoint, is_int8_fast=is_measured and is_fast)


@contextmanager
def faults_of(path: Path) -> Generator[None]:
    """What a checkpoint's content makes go wrong is the checkpoint's fault, with its name."""
    try:
        yield
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _chat_template(source: ModelSource) -> str | None:
    """The user's own, in place of the checkpoint's."""
    if source.chat_template is None:
        return None
    try:
        text = Path(source.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template must be a readable Jinja file: {error}") from error
    ChatTemplate(text, bos_token=None, eos_token=None)  # refuses one that does not compile
    return text
