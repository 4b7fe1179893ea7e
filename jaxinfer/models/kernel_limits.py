"""Which models the GPU kernels take. Asked before anything is compiled."""

from __future__ import annotations

from jax.experimental import pallas as pl

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig
from pallas_kernels.attention_arguments import MAX_HEAD_DIM, MAX_SHARED
from pallas_kernels.backend import ROW_TILES, TOKEN_TILES, Backend


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
