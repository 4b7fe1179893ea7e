"""The memory plan of a model beside one that runs: it has what that one leaves.

The pool is as large as was asked for if there is room, else as large as there is room for.
"""

from __future__ import annotations

from jaxinfer.config import EngineConfig, replace
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.runtime.kv_cache import page_bytes, pages_dtype
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import MemoryPlan, asked_bytes, plan_memory

STEPS_OF_A_POOL = 16  # a pool that is cut has one of so many sizes between two powers of two


def plan_beside(
    config: EngineConfig,
    decoder: Decoder,
    budget: MemoryBudget,
    programs_bytes: int,
    *,
    least_model_len: int,
) -> MemoryPlan:
    """As `plan_memory`, within what is left.

    Args:
        config: of the running engine. Its max_model_len may be over this model's limit, and its
            pool too small for one of this model's sequences: then it gets the limit, and a pool
            that will do.
        budget: what is left beside the running engine (`MemoryBudget.beside`).
        least_model_len: tokens of a sequence that has to fit where the length was left open, less
            for a model that cannot have as many.
    Raises: ConfigError that says how much is missing.
    """
    limit, wanted = decoder.config.max_position_embeddings, config.scheduler.max_model_len
    if wanted is not None:
        config = replace(config, max_model_len=min(wanted, limit))
    tokens = min(wanted or least_model_len, limit)
    least = -(-tokens // config.cache.page_size)
    dtype = pages_dtype(config.cache.kv_cache_dtype, decoder.dtype)
    one = page_bytes(decoder.config, page_size=config.cache.page_size, dtype=dtype)
    left = _left(decoder, budget, programs_bytes)
    if left is not None and left < least * one:
        raise _missing(decoder, budget, programs_bytes, least * one, tokens)
    asked = asked_bytes(config, budget)
    if asked is None:
        return plan_memory(config, decoder, budget, programs_bytes)
    num_pages = max(asked // one, least)
    if left is not None and num_pages * one > left:
        num_pages = max(_rounded(left // one), least)
    pool = replace(config, kv_cache_bytes=num_pages * one)
    return plan_memory(pool, decoder, budget, programs_bytes)


def _left(decoder: Decoder, budget: MemoryBudget, programs_bytes: int) -> int | None:
    """For the pool; below 0: not even for the rest. None: it is not known."""
    if budget.total_bytes is None:
        return None
    return budget.total_bytes - budget.process_bytes - decoder.params_bytes - programs_bytes


def _rounded(num_pages: int) -> int:
    """Down, to a size that comes again: on a CPU what is left is never the same twice, and the
    programs of each size are compiled anew.
    """
    unit = 2 ** max(0, num_pages.bit_length() - STEPS_OF_A_POOL.bit_length())
    return num_pages // unit * unit


def _missing(
    decoder: Decoder, budget: MemoryBudget, programs_bytes: int, pool: int, tokens: int
) -> ConfigError:
    assert budget.total_bytes is not None
    left = max(0, budget.total_bytes - budget.process_bytes)
    needed = decoder.params_bytes + programs_bytes + pool
    return ConfigError(
        f"a model of another shape needs memory beside the running one: weights "
        f"{decoder.params_bytes} + programs {programs_bytes or 'not known yet'} + KV pool {pool} "
        f"(of one sequence of {tokens} tokens) = {needed} bytes, but {left} are left: "
        f"{needed - left} are missing; drop other versions, or start the server with a smaller "
        "pool (--kv-cache-memory) or a smaller --max-model-len"
    )
