"""What the device's memory is for, decided before the KV pool is allocated: the sum of weights,
programs and pool against the budget.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.config import MIN_MEMORY_UTILIZATION, EngineConfig, SchedulerConfig
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.kv_cache import page_bytes, page_shape, pages_dtype
from jaxinfer.runtime.memory_budget import ROOT, MemoryBudget, free_bytes
from pallas_kernels.addressing import LOWEST_BAD, LOWEST_GOOD, is_addressable

_log = logging.getLogger(__name__)

CPU_POOL_BYTES = 1 << 30  # where nothing is asked for: a CPU's memory belongs to others too
SHARE_DIGITS = 4  # of the utilization that is recommended


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sum, and what the pool holds. All sizes in bytes."""

    weights_bytes: int
    programs_bytes: int  # code, and activations of the steps in flight
    page_bytes: int  # one page, all layers
    num_pages: int
    page_size: int  # tokens
    max_model_len: int  # tokens of prompt and output
    fewest_pages: int  # that would do: for one longest sequence, or 1 where the length is open
    budget: MemoryBudget
    pages_dtype: jnp.dtype  # of keys and values

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def fits(self) -> bool:
        """Whether the sum is within the budget, as far as that is known."""
        return self.budget.total_bytes is None or self.total_bytes <= self.budget.total_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, and on a CPU the process itself."""
        fixed = self.budget.process_bytes + self.weights_bytes + self.programs_bytes
        return fixed + self.pool_bytes

    def free_bytes(self, taken_bytes: int) -> int | None:
        """What another version may take: of a GPU's budget, while all that is there takes
        `taken_bytes`; of what a CPU's system has now. None: it does not tell.
        """
        if not self.budget.is_gpu:
            return free_bytes(ROOT)
        assert self.budget.total_bytes is not None
        return max(0, self.budget.total_bytes - taken_bytes)

    def by_kind(self) -> dict[str, int]:
        """The parts of the sum."""
        own = self.budget.process_bytes
        return ({"process": own} if own else {}) | {
            "weights": self.weights_bytes,
            "programs": self.programs_bytes,
            "kv_pool": self.pool_bytes,
        }

    def line(self) -> str:
        """The sum, for people."""
        words = [f"{k.replace('kv_', 'KV ')} {_mib(size)}" for k, size in self.by_kind().items()]
        total = self.budget.total_bytes
        in_int8 = ", int8" if self.pages_dtype == jnp.int8 else ""
        return (
            f"{' + '.join(words)} ({self.num_pages} pages of {self.page_size} tokens{in_int8}) = "
            f"{_mib(self.total_bytes)}" + (f" of {_mib(total)}" if total is not None else "")
        )

    def scheduler_config(self, config: SchedulerConfig) -> SchedulerConfig:
        """`config` with the context length resolved."""
        return dataclasses.replace(config, max_model_len=self.max_model_len)

    def check(self) -> None:
        """Raises: ConfigError if the sum is over the budget, with the pools that would fit."""
        total, one = self.budget.total_bytes, self.page_bytes
        if total is None or self.fits:
            return
        most = (total - self.total_bytes + self.pool_bytes) // one * one
        least = self.fewest_pages * one
        advice = (
            f"give the pool from {least} to {most} bytes (--kv-cache-memory {most})"
            if most >= least
            else f"with the smallest pool they need {self.total_bytes - self.pool_bytes + least}"
        )
        parts = " + ".join(f"{kind} {size}" for kind, size in self.by_kind().items())
        raise ConfigError(
            f"{parts} = {self.total_bytes} bytes are planned, but there are {total}; {advice}"
        )


def plan_memory(
    config: EngineConfig, decoder: Decoder, budget: MemoryBudget, programs_bytes: int
) -> MemoryPlan:
    """Sizes the pool.

    `kv_cache_bytes` if given; else 1 GiB on a CPU, and on a GPU what the budget leaves beside
    weights and programs. Never more than max_num_seqs full contexts can use. A context that was
    left open is shortened to what the pool holds, which changes no factors of longrope: the bits of
    an answer must not follow from the memory of the moment. Int8 pages for GPU kernels are planned
    no larger than those can address, with a warning.

    Raises: ConfigError if max_model_len is over the model's limit, the pool cannot hold one such
        sequence, or the int8 pages asked for cannot be addressed: with a setting that would do.
    """
    longest = longest_context(config, decoder)
    page_size = config.cache.page_size
    full = -(-longest // page_size)
    fewest = 1 if config.scheduler.max_model_len is None else full
    dtype = pages_dtype(config.cache.kv_cache_dtype, decoder.dtype)
    smallest = MemoryPlan(
        weights_bytes=decoder.params_bytes,
        programs_bytes=programs_bytes,
        page_bytes=page_bytes(decoder.config, page_size=page_size, dtype=dtype),
        num_pages=fewest,
        page_size=page_size,
        max_model_len=longest,
        fewest_pages=fewest,
        budget=budget,
        pages_dtype=dtype,
    )
    planned = is_planned(config, budget)
    pool = _pool_bytes(config, budget, smallest)
    num_pages = min(pool // smallest.page_bytes, full * config.scheduler.max_num_seqs)
    if decoder.arithmetic.backend.form != "reference":
        num_pages = _addressable(decoder, smallest, num_pages, is_asked=not planned)
    if num_pages < smallest.num_pages:
        raise _too_small(smallest, num_pages, is_planned=planned)
    plan = dataclasses.replace(
        smallest, num_pages=num_pages, max_model_len=min(longest, num_pages * page_size)
    )
    _warn_of_long_factors(decoder, plan.max_model_len)
    return plan


def _warn_of_long_factors(decoder: Decoder, max_model_len: int) -> None:
    """Where the pool, which does not choose them, holds no text that they are for."""
    scaling = decoder.config.rope_scaling
    if scaling and scaling.is_long and max_model_len <= scaling.original_max_position_embeddings:
        _log.warning(
            "texts have at most %d tokens here, but are turned by the model's factors for longer "
            "ones; --max-model-len %d takes those for short ones",
            max_model_len,
            max_model_len,
        )


def is_planned(config: EngineConfig, budget: MemoryBudget) -> bool:
    """Whether the pool's size follows from the budget, and so from what the programs need."""
    return asked_bytes(config, budget) is None


def asked_bytes(config: EngineConfig, budget: MemoryBudget) -> int | None:
    """What the flags say of the pool; None: it has all that is left."""
    if config.cache.kv_cache_bytes is not None or budget.is_gpu:
        return config.cache.kv_cache_bytes
    return CPU_POOL_BYTES


def longest_context(config: EngineConfig, decoder: Decoder) -> int:
    """Tokens of prompt and output, if memory allows. Raises: ConfigError."""
    wanted = config.scheduler.max_model_len
    limit = decoder.config.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigError(f"max_model_len must be at most the model's {limit}; got {wanted}")
    return wanted or limit


def _pool_bytes(config: EngineConfig, budget: MemoryBudget, smallest: MemoryPlan) -> int:
    asked = asked_bytes(config, budget)
    if asked is not None:
        return asked
    assert budget.total_bytes is not None
    return max(0, budget.total_bytes - smallest.weights_bytes - smallest.programs_bytes)


def _addressable(decoder: Decoder, plan: MemoryPlan, num_pages: int, *, is_asked: bool) -> int:
    """As many pages of those as GPU kernels can address. Raises: ConfigError if they `is_asked`."""
    shape = page_shape(decoder.config, num_pages=1, page_size=plan.page_size)
    of_page = math.prod(shape)  # elements of one layer's keys
    if is_addressable(num_pages * of_page, plan.pages_dtype.itemsize):
        return num_pages
    most, next_good = (LOWEST_BAD - 1) // of_page, -(-LOWEST_GOOD // of_page)
    what = f"int8 keys of {num_pages * of_page} bytes in a layer, which GPU kernels cannot address"
    if is_asked:
        raise ConfigError(
            f"the KV pool would have {what}; give it at most {most * plan.page_bytes} bytes "
            f"(--kv-cache-memory {most * plan.page_bytes}), at least {next_good * plan.page_bytes} "
            "with as many sequences, or --kv-cache-dtype auto"
        )
    _log.warning("the KV pool holds %d pages: %d would be %s", most, num_pages, what)
    return most


def _too_small(smallest: MemoryPlan, num_pages: int, *, is_planned: bool) -> ConfigError:
    held, needed = num_pages * smallest.page_size, smallest.num_pages * smallest.page_size
    asked = min(needed, smallest.max_model_len)
    what = f"the KV pool has room for {held} tokens, but one sequence may have {asked}"
    if not is_planned:
        return ConfigError(
            f"{what}; give it at least {smallest.pool_bytes} bytes "
            f"(--kv-cache-memory {smallest.pool_bytes}) or lower max_model_len"
        )
    total, device = smallest.total_bytes, smallest.budget.device_bytes
    assert device is not None
    sizes = f"weights {smallest.weights_bytes} + programs {smallest.programs_bytes} + KV pool"
    if total > device:
        return ConfigError(
            f"{what}; {sizes} need at least {total} bytes, but the device has {device}: "
            "lower max_model_len, or take a smaller model"
        )
    return ConfigError(
        f"{what}; {sizes} need at least {total} bytes of the device's {device} "
        f"(--gpu-memory-utilization {smallest_share(total, device):.{SHARE_DIGITS}f})"
    )


def smallest_share(needed_bytes: int, device_bytes: int) -> float:
    """The smallest memory_utilization, of four digits, that gives `needed_bytes`."""
    unit = 10**SHARE_DIGITS
    parts = math.ceil(needed_bytes / device_bytes * unit)
    while int(device_bytes * (parts / unit)) < needed_bytes:  # rounding of the product
        parts += 1
    return max(parts / unit, MIN_MEMORY_UTILIZATION)


def default_dtype(name: str) -> jnp.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU, where bfloat16 products are slower."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
