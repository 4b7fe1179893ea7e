"""Which models and formats of weights the kernels take. Asked before anything is compiled."""

from __future__ import annotations

from jax.experimental import pallas as pl

from checkpoints.formats import HEAD_FORMAT, Quantization, WeightFormat, packed_group
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
    dim, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    _check_depth(quantization.head, dim, backend)
    deepest = max(dim, heads, *config.mlp_sizes)
    for kept in (quantization.weights, *dict(quantization.exceptions).values()):
        _check_depth(kept, deepest, backend)
    if config.experts is not None:
        _check_order(quantization)
    if backend.form != "reference":
        if quantization.head:
            size = config.vocab_size * dim
            _check_bytes(f"vocab_size times hidden_size is {size}", size, "without the head")
        _check_experts(config, quantization)


def _check_order(quantization: Quantization) -> None:
    """Experts share the rows that they multiply."""
    experts = (kept for name, kept in quantization.exceptions if ".experts." in name)
    for kept in (quantization.weights, *experts):
        if kept is not None and kept.has_order:
            raise ConfigError(
                f"config.json: experts take their inputs in the order that they have; got "
                f"{kept.name}: quantize the model without act-order"
            )


def _check_experts(config: ModelConfig, quantization: Quantization) -> None:
    """All of a layer's experts are one weight."""
    experts, dim = config.experts, config.hidden_size
    if experts is None:
        return
    hidden = experts.intermediate_size
    for layer, kind in enumerate(config.layer_kinds):
        for product, outputs, inputs in (
            ("gate_proj", hidden, dim),
            ("up_proj", hidden, dim),
            ("down_proj", dim, hidden),
        ):
            name = f"layers.{layer}.mlp.experts.{product}"
            kept = quantization.of(name) if kind.is_sparse else None
            if kept is not None:
                size = experts.count * outputs * _width(kept, inputs)
                _check_bytes(f"{name} in {kept.name} has {size}", size, "with other bits")


def _width(kept: WeightFormat, num_inputs: int) -> int:
    """Bytes of an output's integers."""
    if kept.bits == 8:
        return num_inputs
    return kept.groups(num_inputs) * packed_group(kept.group_size, num_inputs) // 2


def _check_bytes(what: str, size: int, how: str) -> None:
    if LOWEST_BAD <= size < LOWEST_GOOD:
        raise ConfigError(
            f"config.json: GPU kernels take int8 weights of fewer than 2**31 or more than 2**32 "
            f"bytes; {what}: quantize {how}"
        )


def _check_depth(kept: WeightFormat | None, num_inputs: int, backend: Backend) -> None:
    """Products of int8 by int8 under one scale are added up in int32."""
    if kept is None or kept.bits == 4 or kept.group_size is not None:
        return
    is_integer = backend.form == "reference" or kept.activations != "float"
    most = MOST_DEPTH // 2 if kept.has_zero else MOST_DEPTH
    if is_integer and num_inputs > most:
        raise ConfigError(
            f"config.json: products in {kept.name} add up at most {most} inputs; "
            f"got {num_inputs}: quantize the model in groups"
        )
