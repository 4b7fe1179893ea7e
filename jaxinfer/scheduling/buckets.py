"""Every shape that is ever compiled, enumerated before anything runs.

Host only: no JAX.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from jaxinfer.config import MIN_ROWS

MIN_TOKENS = 16
BLOCKS_Q = (16, 32, 64)  # queries per wide attention block of a prefill step
WIDE_BLOCKS_AT_ONCE = 2  # the device attends this many together
HISTORY_TILE = 128  # tokens of a penalized row that the device counts at once


@dataclass(frozen=True, slots=True)
class Buckets:
    """Row buckets of decode and sampling, token buckets of prefill; both ascending."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    max_pages_per_seq: int  # M: the width of every page table
    max_history: int  # H: the width of a penalized row's tokens, a multiple of HISTORY_TILE

    @classmethod
    def for_limits(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int
    ) -> Buckets:
        """Powers of two from the smallest exact shape up to the limits, rounded up."""
        return cls(
            rows=_powers(MIN_ROWS, max_num_seqs),
            tokens=_powers(MIN_TOKENS, max_num_batched_tokens),
            max_pages_per_seq=-(-max_model_len // page_size),
            max_history=-(-max_model_len // HISTORY_TILE) * HISTORY_TILE,
        )

    @property
    def max_rows(self) -> int:
        return self.rows[-1]

    @property
    def max_tokens(self) -> int:
        return self.tokens[-1]

    def rows_for(self, num_rows: int) -> int:
        """The smallest row bucket that holds `num_rows`."""
        return self.rows[bisect.bisect_left(self.rows, num_rows)]

    def tokens_for(self, num_tokens: int) -> int:
        """The smallest token bucket that holds `num_tokens`."""
        return self.tokens[bisect.bisect_left(self.tokens, num_tokens)]

    def block_q(self, tokens: int) -> int:
        """Queries of a wide attention block in a prefill step of this bucket.

        Wide blocks compute faster, narrow ones waste less where there are few tokens. A query's
        bits do not depend on it.
        """
        return next((q for q in BLOCKS_Q if tokens <= 4 * q), BLOCKS_Q[-1])

    def wide_blocks(self, tokens: int) -> int:
        """Wide attention blocks that a prefill step of this bucket may need.

        Each sequence of two or more tokens wastes less than one block. A multiple of
        WIDE_BLOCKS_AT_ONCE.
        """
        num_blocks = tokens // self.block_q(tokens) + min(self.max_rows, tokens // 2)
        return -(-num_blocks // WIDE_BLOCKS_AT_ONCE) * WIDE_BLOCKS_AT_ONCE


def _powers(low: int, limit: int) -> tuple[int, ...]:
    sizes = [low]
    while sizes[-1] < limit:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)
