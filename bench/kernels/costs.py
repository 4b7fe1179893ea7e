"""What a kernel cannot do without: bytes through the memory bus, operations in the tensor cores.

Counted from shapes alone. Every input is read once and every output written once; a multiplication
and an addition are two operations; what vector units do on the way is not counted. What a form
reads twice, pads, or masks is its own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BF16, F32, INT32, INT8 = 2, 4, 4, 1  # bytes


@dataclass(frozen=True, slots=True)
class Cost:
    num_bytes: int
    num_ops: int = 0
    kind: Literal["bf16", "int8"] = "bf16"  # the rate at which the operations can run


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's limits, per second."""

    name: str
    bytes_per_s: float
    bf16_ops_per_s: float  # dense
    int8_ops_per_s: float

    def floor_s(self, cost: Cost) -> float:
        """No form of a kernel is faster, if its operands come from memory."""
        rate = self.int8_ops_per_s if cost.kind == "int8" else self.bf16_ops_per_s
        return max(cost.num_bytes / self.bytes_per_s, cost.num_ops / rate)


# As NVIDIA's data sheets have them.
H200 = Card("H200", 4.8e12, 989e12, 1979e12)
A100 = Card("A100-80G", 2.04e12, 312e12, 624e12)


def matmul_cost(
    rows: int, in_dim: int, out_dim: int, *, weight_bits: int = 16, group: int | None = None
) -> Cost:
    """bf16[rows, in] x [out, in] -> bf16[rows, out].

    Args:
        group: elements of a row that share a float32 scale; None for weights without scales.
    """
    weights = out_dim * in_dim * weight_bits // 8
    scales = 0 if group is None else F32 * out_dim * (in_dim // group)
    ends = BF16 * rows * (in_dim + out_dim)
    return Cost(weights + scales + ends, 2 * rows * in_dim * out_dim)


def expert_cost(
    pairs: int,
    num_experts: int,
    in_dim: int,
    out_dim: int,
    *,
    weight_bits: int = 16,
    group: int | None = None,
) -> Cost:
    """bf16[pairs, in] by the weights of the experts that are wanted -> bf16[pairs, out].

    Args:
        pairs: of a token and an expert of its.
    """
    weights = matmul_cost(0, in_dim, num_experts * out_dim, weight_bits=weight_bits, group=group)
    ends = BF16 * pairs * (in_dim + out_dim)
    return Cost(weights.num_bytes + ends, 2 * pairs * in_dim * out_dim)


def w8a8_cost(rows: int, in_dim: int, out_dim: int) -> Cost:
    """int8[rows, in] x int8[out, in] -> bf16[rows, out], a float32 scale per row of either."""
    num_bytes = INT8 * in_dim * (rows + out_dim) + F32 * (rows + out_dim) + BF16 * rows * out_dim
    return Cost(num_bytes, 2 * rows * in_dim * out_dim, "int8")


def kv_bytes_per_token(kv_heads: int, head_dim: int, *, is_int8: bool) -> int:
    """Of keys and values; of int8 ones with a float32 scale per head."""
    per_head = INT8 * head_dim + F32 if is_int8 else BF16 * head_dim
    return 2 * kv_heads * per_head


def decode_cost(
    contexts: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    page_size: int,
    is_int8: bool,
) -> Cost:
    """Attention of one query for each context, over that many tokens."""
    rows, tokens = len(contexts), sum(contexts)
    pages = sum(-(-context // page_size) for context in contexts)
    kv = tokens * kv_bytes_per_token(kv_heads, head_dim, is_int8=is_int8)
    ends = 2 * BF16 * rows * heads * head_dim  # queries and output
    return Cost(kv + ends + INT32 * (pages + rows), 4 * heads * head_dim * tokens)


def prefill_cost(
    chunks: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    page_size: int,
    is_int8: bool,
) -> Cost:
    """Causal attention of chunks (first position, number of tokens), one per sequence."""
    queries = sum(length for _, length in chunks)
    contexts = [start + length for start, length in chunks]
    whole = decode_cost(contexts, heads, kv_heads, head_dim, page_size=page_size, is_int8=is_int8)
    ends = 2 * BF16 * (queries - len(chunks)) * heads * head_dim
    pairs = sum(length * start + length * (length + 1) // 2 for start, length in chunks)
    return Cost(whole.num_bytes + ends, 4 * heads * head_dim * pairs)


def rms_norm_cost(rows: int, dim: int) -> Cost:
    """bf16[rows, dim] -> the same, with a weight bf16[dim]."""
    return Cost(BF16 * dim * (2 * rows + 1))


def row_sum_cost(rows: int, width: int) -> Cost:
    """float32[rows, width] -> float32[rows]."""
    return Cost(F32 * rows * (width + 1))


def kv_write_cost(tokens: int, kv_heads: int, head_dim: int, *, is_int8: bool) -> Cost:
    """bf16 keys and values into their places of the pool."""
    read = kv_bytes_per_token(kv_heads, head_dim, is_int8=False)
    written = kv_bytes_per_token(kv_heads, head_dim, is_int8=is_int8)
    return Cost(tokens * (read + written + 2 * INT32))
