"""What every form of attention over KV pages is given, and which of it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

from pallas_kernels.addressing import check_addressable
from pallas_kernels.empty_axes import check_not_empty
from pallas_kernels.query_blocks import NARROW_GROUP

TILE_KV = 64  # tokens of the reference form's tile
LARGEST_PAGE = 128  # tokens; a page size must divide it
MAX_SHARED = 32  # query heads per KV head that a kernel takes
MAX_HEAD_DIM = 256  # of a kernel


class KVPages(NamedTuple):
    """One layer's KV and how rows find theirs; a kernel holds references to the same."""

    k_pages: jax.Array  # float or int8 [P, K, S, D]
    v_pages: jax.Array
    k_scales: jax.Array | None  # float32[P, K, S] of int8 pages: a token's head is scale * int8
    v_scales: jax.Array | None
    page_table: jax.Array  # int32[R, M]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a score is made of q·k, and which tokens are scored."""

    scale: float  # multiplies q·k
    window: int | None  # tokens that a query sees, itself included; None: all before it
    soft_cap: float | None  # score -> soft_cap * tanh(score / soft_cap)


def check_attention(q: jax.Array, pages: KVPages, positions: jax.Array, scoring: Scoring) -> None:
    """Raises ValueError naming the argument that does not fit."""
    _check_pages(q, pages)
    _check_scales(pages)
    if pages.page_table.ndim != 2 or pages.page_table.dtype != "int32":
        raise ValueError(
            f"page_table must be int32 [rows, M]; "
            f"got {pages.page_table.dtype} {pages.page_table.shape}"
        )
    check_token_axis(q, positions=positions)
    if scoring.window is not None and scoring.window < 1:
        raise ValueError(f"window must be at least 1 token; got {scoring.window}")
    if scoring.soft_cap is not None and scoring.soft_cap <= 0:
        raise ValueError(f"soft_cap must be above 0; got {scoring.soft_cap}")
    check_addressable(k_pages=pages.k_pages, v_pages=pages.v_pages)


def check_decode_rows(q: jax.Array, page_table: jax.Array) -> None:
    """Raises ValueError unless there are as many rows as queries, and whole groups of them."""
    if sum(q.shape[:1]) % NARROW_GROUP or page_table.shape[:1] != q.shape[:1]:
        raise ValueError(
            f"q must have a multiple of {NARROW_GROUP} rows and page_table as many; "
            f"got q {q.shape} and page_table {page_table.shape}"
        )


def check_token_axis(q: jax.Array, **arrays: jax.Array) -> None:
    """Raises ValueError for an array that is not int32 of q's first axis."""
    for name, array in arrays.items():
        if array.shape != q.shape[:1] or array.dtype != "int32":
            raise ValueError(f"{name} must be int32 {q.shape[:1]}; got {array.dtype} {array.shape}")


def _check_pages(q: jax.Array, pages: KVPages) -> None:
    k_pages, v_pages = pages.k_pages, pages.v_pages
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must have one shape [P, K, S, D]; "
            f"got {k_pages.shape} and {v_pages.shape}"
        )
    _, num_kv, page_size, head_dim = k_pages.shape
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv:
        raise ValueError(
            f"q must be [rows, H, {head_dim}] with H a multiple of {num_kv}; got {q.shape}"
        )
    if LARGEST_PAGE % page_size:
        raise ValueError(f"k_pages' page size must divide {LARGEST_PAGE}; got {page_size}")
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages and v_pages must have one dtype; got {k_pages.dtype} and {v_pages.dtype}"
        )


def _check_scales(pages: KVPages) -> None:
    is_quantized, shape = pages.k_pages.dtype == "int8", pages.k_pages.shape[:3]
    for name, scales in (("k_scales", pages.k_scales), ("v_scales", pages.v_scales)):
        if is_quantized and (scales is None or scales.shape != shape or scales.dtype != "float32"):
            got = "None" if scales is None else f"{scales.dtype} {scales.shape}"
            raise ValueError(f"{name} of int8 pages must be float32 {shape}; got {got}")
        if not is_quantized and scales is not None:
            raise ValueError(
                f"{name} must be None for {pages.k_pages.dtype} pages; "
                f"got {scales.dtype} {scales.shape}"
            )


def check_kernel(q: jax.Array, pages: KVPages, scoring: Scoring) -> None:
    """Raises ValueError for what only the reference form takes."""
    check_not_empty(q=q, k_pages=pages.k_pages, page_table=pages.page_table)
    _, num_kv, page_size, head_dim = pages.k_pages.shape
    if head_dim > MAX_HEAD_DIM or q.shape[1] > MAX_SHARED * num_kv:
        raise ValueError(
            f"q must have head dim at most {MAX_HEAD_DIM} and at most {MAX_SHARED} heads per KV "
            f"head for a kernel; got {q.shape} with {num_kv} KV heads"
        )
    if page_size < 8:
        raise ValueError(f"k_pages' page size must be at least 8 for a kernel; got {page_size}")
    if pages.k_pages.dtype not in (q.dtype, "int8") and q.dtype != "float32":
        raise ValueError(
            f"k_pages must be int8 or {q.dtype} as q for a kernel; got {pages.k_pages.dtype}"
        )
    if not isinstance(scoring.scale, int | float):
        raise ValueError(
            f"scale must be a Python float for a kernel; got {type(scoring.scale).__name__}"
        )
