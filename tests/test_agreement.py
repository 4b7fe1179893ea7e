"""Constants that host and device half must share, though neither may import the other."""

from __future__ import annotations

from jaxinfer.config import MIN_ROWS
from jaxinfer.scheduling.buckets import WIDE_BLOCKS_AT_ONCE, Buckets
from pallas_kernels.attention_arguments import LARGEST_PAGE
from pallas_kernels.query_blocks import NARROW_GROUP, WIDE_GROUP


def test_row_buckets_are_whole_groups_of_narrow_blocks():
    buckets = Buckets.for_limits(
        max_num_seqs=100, max_num_batched_tokens=512, max_model_len=4096, page_size=64
    )
    assert MIN_ROWS % NARROW_GROUP == 0
    assert all(rows % NARROW_GROUP == 0 for rows in buckets.rows)


def test_wide_blocks_are_whole_groups():
    assert WIDE_BLOCKS_AT_ONCE % WIDE_GROUP == 0


def test_page_sizes_divide_the_attention_tile():
    assert LARGEST_PAGE == 128  # CacheConfig refuses page sizes that do not divide it
