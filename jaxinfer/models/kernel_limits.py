"""Which models and formats of weights the kernels take. Asked before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator

from jax.experimental import pallas as pl

from checkpoints.formats import HEAD_FORMAT, Quantization, WeightFormat
from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig
from pallas_kernels.addressing import LOWEST_BAD, LOWEST_GOOD
from pallas_kernels.attention_arguments import MAX_HEAD_DIM, MAX_SHARED
from pallas_kernels.backend import ROW_TILES, TOKEN_TILES, Backend
from pallas_kernels.w8a8_matmul import MOST_DEPTH


def check_kernels(config: ModelConfig, backend: Backend) -> None:
    """Raises: ConfigError for a size that is too large for them; the reference form takes any."""
    if backend.form == "reference":
        return
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    sizes = (
        ("head_dim", head_dim, MAX_HEAD_DIM),
        ("query heads per KV head", config.num_attention_heads // kv_heads, MAX_SHARED),
        ("hidden_size", config.hidden_size, ROW_TILES[backend.gpu].most),
        (
            "KV heads times head_dim, rounded up to powers of two",
            pl.next_power_of_2(kv_heads) * pl.next_power_of_2(head_dim),
            TOKEN_TILES[backend.gpu].most,
        ),
    )
    for name, size, most in sizes:
        if size > most:
            raise ConfigError(
                f"config.json: GPU kernels take {name} up to {most}; got {size}: "
                "take --kernel-backend reference"
            )


def check_formats(config: ModelConfig, quantization: Quantization, backend: Backend) -> None:
    """Raises: ConfigError for a format or a size whose products would be wrong."""
    if quantization.head not in (None, HEAD_FORMAT):
        raise ConfigError(
            f"config.json: embedding and head may be kept as {HEAD_FORMAT.name} or not quantized; "
            f"got {quantization.head.name}: quantize the model again"
        )
    mlp, heads = config.intermediate_size, config.num_attention_heads * config.head_dim
    deepest = max(config.hidden_size, mlp, heads)
    for kept in _formats(quantization):
        most = MOST_DEPTH // 2 if kept.has_zero else MOST_DEPTH
        if _adds_integers_of_a_row(kept, backend) and deepest > most:
            raise ConfigError(
                f"config.json: products in {kept.name} add up at most {most} inputs; "
                f"got {deepest}: quantize the model in groups"
            )
    head_bytes = config.vocab_size * config.hidden_size if quantization.head else 0
    if backend.form != "reference" and LOWEST_BAD <= head_bytes < LOWEST_GOOD:
        raise ConfigError(
            f"config.json: GPU kernels take int8 weights of fewer than 2**31 or more than 2**32 "
            f"bytes; vocab_size times hidden_size is {head_bytes}: quantize without the head"
        )


def _formats(quantization: Quantization) -> Iterator[WeightFormat]:
    exceptions = (kept for _, kept in quantization.exceptions)
    for kept in (quantization.weights, quantization.head, *exceptions):
        if kept is not None:
            yield kept


def _adds_integers_of_a_row(kept: WeightFormat, backend: Backend) -> bool:
    """In int32, which bounds how many there may be."""
    is_integer = backend.form == "reference" or kept.activations != "float"
    return is_integer and kept.bits == 8 and kept.group_size is None
