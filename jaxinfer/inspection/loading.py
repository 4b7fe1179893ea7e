"""What a checkpoint would be when it is loaded here, and why it would not be; reads no weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from checkpoints.contents import Contents
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, quantization_of
from jaxinfer.build import backend_of
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.found_model import choose, faults_of
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.kv_cache import page_bytes
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import default_dtype
from jaxinfer.runtime.weight_choice import ON_THE_FLY
from jaxinfer.runtime.weights import weight_faults
from jaxinfer.tokenizer import Tokenizer

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Loading:
    """A model as this machine would have it. Sizes in bytes."""

    config: ModelConfig
    num_parameters: int
    form: str  # of the weights, with its price
    dtype: str  # of what is not quantized
    weights_bytes: int
    other_forms: dict[str, int]  # by --dtype or --quantization: what the weights would take
    kv_token_bytes: dict[str, int]  # by dtype: the model's own, and int8
    num_context_tokens: int | None  # of the pool beside the weights, programs not counted, at most
    # the model's; None: how much memory there is is not told
    budget: MemoryBudget


def plan_loading(contents: Contents, config: EngineConfig, budget: MemoryBudget) -> Loading | None:
    """None if it is not known what the model is. What would not load is added to the faults."""
    attempt = _Attempt(contents, config)
    if not contents.config:
        return None
    decoder = attempt.decoder()
    if decoder is None:
        return None
    if contents.checkpoint is not None:
        attempt.check_files(decoder)
    return attempt.loading(decoder, budget)


class _Attempt:
    """Every step that can fail leaves its reason and goes on."""

    def __init__(self, contents: Contents, config: EngineConfig):
        self._contents, self._config = contents, config
        self._dtype = default_dtype(config.source.dtype)
        self._form = "unknown"

    def decoder(self) -> Decoder | None:
        return self._tried(lambda: self._decoder(self._dtype, self._quantization()))

    def check_files(self, decoder: Decoder) -> None:
        """Every tensor used and every parameter filled; and the tokenizer's own rules."""
        checkpoint = self._contents.checkpoint
        assert checkpoint is not None
        for fault in weight_faults(checkpoint, decoder):
            self._contents.add_fault(fault)
        self._tried(lambda: Tokenizer.of(checkpoint))

    def loading(self, decoder: Decoder, budget: MemoryBudget) -> Loading:
        config, of_page = decoder.config, self._page_bytes(decoder.config, self._dtype)
        page_size = self._config.cache.page_size
        tokens = None
        if budget.total_bytes is not None:
            left = budget.total_bytes - budget.process_bytes - decoder.params_bytes
            tokens = min(max(0, left) // of_page * page_size, config.max_position_embeddings)
            if not tokens:
                self._contents.add_fault(
                    f"{self._contents.path}: weights {decoder.params_bytes} + one page of "
                    f"{page_size} tokens {of_page}"
                    + (f" + process {budget.process_bytes}" if budget.process_bytes else "")
                    + f" bytes are needed, but there are {budget.total_bytes}; "
                    "take a smaller form (--dtype, --quantization) or another machine"
                )
        return Loading(
            config=config,
            num_parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(decoder.float_shapes)),
            form=self._form,
            dtype=self._dtype.name,
            weights_bytes=decoder.params_bytes,
            other_forms=self._other_forms(),
            kv_token_bytes={
                name: self._page_bytes(config, dtype) // page_size
                for name, dtype in ((self._dtype.name, self._dtype), ("int8", jnp.dtype(jnp.int8)))
            },
            num_context_tokens=tokens,
            budget=budget,
        )

    def _quantization(self) -> Quantization | None:
        checkpoint = self._contents.checkpoint
        if checkpoint is None:
            return quantization_of(self._contents.config, str(self._contents.path))
        backend = backend_of(self._config)
        choice = self._tried(lambda: choose(self._config.source, checkpoint, self._dtype, backend))
        if choice is None:
            return quantization_of(checkpoint.config, str(checkpoint.path))
        self._form = choice.line()
        return choice.quantization

    def _decoder(self, dtype: jnp.dtype, quantization: Quantization | None) -> Decoder:
        with faults_of(self._contents.path):
            return decoder_for(
                self._contents.config,
                dtype=dtype,
                backend=backend_of(self._config),
                quantization=quantization,
            )

    def _other_forms(self) -> dict[str, int]:
        found = quantization_of(self._contents.config, str(self._contents.path))
        forms = {name: (jnp.dtype(name), found) for name in ("float32", "bfloat16")}
        if found is None:
            forms |= {name: (self._dtype, kept) for name, kept in ON_THE_FLY.items()}
        sizes: dict[str, int] = {}
        for name, (dtype, kept) in forms.items():
            try:
                sizes[name] = self._decoder(dtype, kept).params_bytes
            except CheckpointError:  # a form that this device does not compute
                continue
        return sizes

    def _page_bytes(self, config: ModelConfig, dtype: jnp.dtype) -> int:
        return page_bytes(config, page_size=self._config.cache.page_size, dtype=dtype)

    def _tried(self, step: Callable[[], R]) -> R | None:
        try:
            return step()
        except (CheckpointError, ConfigError) as error:
            line = str(error)
            file = str(self._contents.path)
            self._contents.add_fault(line if file in line else f"{file}: {line}")
            return None
