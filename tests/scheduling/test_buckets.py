"""Tests of the compiled shapes."""

from __future__ import annotations

import itertools

import pytest

from jaxinfer.config import MIN_ROWS
from jaxinfer.scheduling.buckets import Buckets


def buckets(max_num_seqs: int = 32, max_num_batched_tokens: int = 512) -> Buckets:
    return Buckets.for_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=100,
        page_size=16,
    )


def test_buckets_are_powers_of_two_up_to_the_limits():
    assert buckets().rows == (8, 16, 32)
    assert buckets().tokens == (16, 32, 64, 128, 256, 512)


def test_limits_between_powers_are_rounded_up():
    assert buckets(33, 600).rows[-1] == 64
    assert buckets(33, 600).tokens[-1] == 1024


def test_no_bucket_has_fewer_than_eight_rows():
    assert buckets(1).rows == (MIN_ROWS,)


def test_page_tables_hold_the_longest_sequence():
    assert buckets().max_pages_per_seq == 7


@pytest.mark.parametrize(("count", "bucket"), [(1, 8), (8, 8), (9, 16), (17, 32), (32, 32)])
def test_the_smallest_row_bucket_is_taken(count, bucket):
    assert buckets().rows_for(count) == bucket


@pytest.mark.parametrize(("count", "bucket"), [(1, 16), (16, 16), (17, 32), (512, 512)])
def test_the_smallest_token_bucket_is_taken(count, bucket):
    assert buckets().tokens_for(count) == bucket


@pytest.mark.parametrize("max_num_seqs", [1, 8, 100])
def test_wide_blocks_hold_the_worst_packing_of_every_bucket(max_num_seqs):
    sizes = buckets(max_num_seqs)
    for tokens in sizes.tokens:
        block_q = sizes.block_q(tokens)
        # The worst: many sequences of two tokens, or of one token more than a block.
        for num_seqs, waste in itertools.product(range(1, sizes.max_rows + 1), (2, block_q + 1)):
            longest = tokens - waste * (num_seqs - 1)
            if longest < 2:
                break
            needed = (num_seqs - 1) * -(-waste // block_q) + -(-longest // block_q)
            assert needed <= sizes.wide_blocks(tokens)


def test_wide_blocks_come_in_pairs():
    for tokens in buckets().tokens:
        assert buckets().wide_blocks(tokens) % 2 == 0
