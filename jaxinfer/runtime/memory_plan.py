"""How much of the device's memory the KV pool gets, decided before anything is allocated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import Decoder
from jaxinfer.runtime.kv_cache import page_bytes

CPU_POOL_BYTES = 1 << 30  # where nothing is asked for: a CPU's memory belongs to others too
GPU_PROGRAM_BYTES = 2 << 30  # left for the programs' temporaries and the compiler's libraries


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The pool, and the context length that it allows. All sizes in bytes."""

    weights_bytes: int
    page_bytes: int  # one page, all layers
    num_pages: int
    page_size: int  # tokens
    max_model_len: int  # tokens of prompt and output

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    def scheduler_config(self, config: SchedulerConfig) -> SchedulerConfig:
        """`config` with the context length resolved."""
        return dataclasses.replace(config, max_model_len=self.max_model_len)


def plan_memory(config: EngineConfig, decoder: Decoder) -> MemoryPlan:
    """Sizes the pool.

    `kv_cache_bytes` if given; else 1 GiB on a CPU, and on a GPU what `memory_utilization` leaves
    beside the weights and 2 GiB for programs. Never more than max_num_seqs full contexts can use.

    Raises: ConfigError if max_model_len is over the model's limit, or the pool cannot hold one such
        sequence.
    """
    model, cache = decoder.config, config.cache
    wanted = config.scheduler.max_model_len
    limit = model.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigError(f"max_model_len must be at most the model's {limit}; got {wanted}")
    one_page = page_bytes(model, page_size=cache.page_size, dtype=decoder.dtype)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(decoder.param_shapes))
    longest = wanted or limit
    pages_per_seq = -(-longest // cache.page_size)
    budget = _pool_budget(config, weights)
    num_pages = min(budget // one_page, pages_per_seq * config.scheduler.max_num_seqs)
    if num_pages < pages_per_seq:
        longest = _shortened(wanted, num_pages, one_page, cache)
    return MemoryPlan(weights, one_page, num_pages, cache.page_size, longest)


def _pool_budget(config: EngineConfig, weights_bytes: int) -> int:
    if config.cache.kv_cache_bytes is not None:
        return config.cache.kv_cache_bytes
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return CPU_POOL_BYTES
    total = int(stats["bytes_limit"] * config.memory_utilization)
    return max(0, total - weights_bytes - GPU_PROGRAM_BYTES)


def _shortened(wanted: int | None, num_pages: int, one_page: int, cache: CacheConfig) -> int:
    """The longest sequence that `num_pages` hold, where the caller left that open."""
    held = num_pages * cache.page_size
    if wanted is None and num_pages > 0:
        return held
    needed = -(-(wanted or 1) // cache.page_size) * one_page
    raise ConfigError(
        f"the KV pool has room for {held} tokens, but one sequence may have {wanted or 1}; "
        f"give it at least {needed} bytes (--kv-cache-memory) or lower max_model_len"
    )


def default_dtype(name: str) -> jnp.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU, where bfloat16 products are slower."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)
