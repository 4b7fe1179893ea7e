"""Which tokens of a packed step attend together.

Narrow blocks are single queries, wide ones consecutive queries of one row; the numbers of both are
multiples of what the reference form computes at once.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax

NARROW_GROUP = 8  # blocks of one query that are computed together
WIDE_GROUP = 2  # blocks of several queries that are computed together

Array = TypeVar("Array")  # jax.Array on the device, numpy on the host, shapes while lowering


class QueryBlocks(NamedTuple, Generic[Array]):
    """Which tokens of a packed token axis [T] attend together; T marks padding.

    Real blocks stand first. Every token is in at most one block; a token in none gets output 0.
    """

    narrow: Array  # int32[A], A a multiple of NARROW_GROUP: blocks of one query
    num_narrow: Array  # int32[]
    wide: Array  # int32[B, Q], B a multiple of WIDE_GROUP: queries of one row
    num_wide: Array  # int32[]


def check_blocks(blocks: QueryBlocks[jax.Array]) -> None:
    """Raises ValueError if the numbers of blocks are not such multiples."""
    narrow, wide = blocks.narrow.shape[0], blocks.wide.shape[0]
    if narrow % NARROW_GROUP or wide % WIDE_GROUP:
        raise ValueError(
            f"blocks must hold a multiple of {NARROW_GROUP} narrow and {WIDE_GROUP} wide ones; "
            f"got {narrow} and {wide}"
        )
    for name, array in zip(blocks._fields, blocks, strict=True):
        if array.dtype != "int32":
            raise ValueError(f"blocks' {name} must be int32; got {array.dtype}")
