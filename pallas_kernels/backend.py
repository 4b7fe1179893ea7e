"""Which form of a kernel runs, and the tile sizes of the Pallas forms for each GPU generation.

Imports nothing of ours, and asks no device: the caller says which one it has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax.numpy as jnp

Form = Literal["pallas", "interpret", "reference"]
Gpu = Literal["sm_80", "sm_90"]
"""Whose tiles are taken. sm_80 stands for Ampere and Ada; its tiles keep to their 99 KiB of shared
memory per block. sm_90 is Hopper."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A static argument of every operation.

    reference: jnp, on any device. pallas: the GPU kernel (Triton lowering). interpret: that kernel's
    source run by XLA on a CPU, for tests.
    """

    form: Form = "reference"
    gpu: Gpu = "sm_90"
    is_exact: bool = True
    """A row's bits depend on that row alone. False: instructions and splits of a sum may follow the
    number of rows, which can be faster. The reference form is always exact."""


REFERENCE = Backend()


def resolve_backend(
    requested: str, *, platform: str, compute_capability: str | None = None, is_exact: bool = True
) -> Backend:
    """`auto` or a form's name -> what runs on this device. `auto` is pallas on a GPU.

    Args:
        platform: of JAX's device: cpu or gpu.
        compute_capability: of a GPU, such as "9.0".
    Raises: ValueError for a name that does not exist, or pallas where there is no GPU for it.
    """
    if requested not in ("auto", *get_args(Form)):
        raise ValueError(
            f"kernel backend must be auto or one of {', '.join(get_args(Form))}; got {requested!r}"
        )
    gpu = _gpu(compute_capability) if platform == "gpu" else None
    if requested == "auto":
        requested = "reference" if gpu is None else "pallas"
    if requested == "pallas" and gpu is None:
        raise ValueError(
            f"kernel backend pallas needs an NVIDIA GPU of compute capability 8.0 or later; got "
            f"platform {platform}, compute capability {compute_capability}: take auto or reference"
        )
    form = next(name for name in get_args(Form) if name == requested)
    return Backend(form, gpu or "sm_90", is_exact)


def _gpu(compute_capability: str | None) -> Gpu | None:
    """Only Hopper has its warpgroup products; later ones are given the other tiles."""
    if compute_capability is None or float(compute_capability) < 8:
        return None
    return "sm_90" if compute_capability.startswith("9.") else "sm_80"


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Of the decode and the ragged kernel; see attention_tile.py."""

    kv: int  # tokens of a KV tile: the same in both kernels
    stages: int  # of a software pipeline over KV tiles
    decode_rows: int  # at least, of a decode program's product; the heads of a query are real
    decode_warps: int
    decode_programs: int  # wanted: where queries are fewer, their KV is shared out
    ragged_rows: int  # queries times heads of a ragged program
    ragged_warps: int
    is_paired: bool = False
    """int8 values are converted in pairs: fewer instructions, and more registers."""


DECODE_PROGRAMS = 4 * 3 * 132  # three at once on each multiprocessor; four turns, as lengths differ


def attention_tiles(
    backend: Backend, head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> AttentionTiles:
    """No spills on either generation, but for 8 to 40 bytes with float32 pages on sm_80."""
    width = max(64, 1 << (head_dim - 1).bit_length())
    is_int8, is_hopper = jnp.dtype(kv_dtype).itemsize == 1, backend.gpu == "sm_90"
    if jnp.dtype(q_dtype).itemsize > 2:  # no tensor cores: registers hold the operands
        kv, warps = max(16, 2048 // width), 8 if is_int8 else 4
        return AttentionTiles(kv, 2, 16, warps, DECODE_PROGRAMS, 16, 8)
    # 32 rows: on Hopper too few for a warpgroup's product, so that decode and ragged kernels take
    # the same instructions. (decode_rows 64, ragged_rows 128 and ragged_warps 8 would make both
    # take the warpgroup's.)
    kv = min(8192 // width, 64 if is_int8 and is_hopper else 128)
    warps = 8 if is_int8 or width > 128 else 4
    tiles = AttentionTiles(kv, 3, 16, 4, DECODE_PROGRAMS, 32, warps, is_paired=is_hopper)
    if is_hopper and not backend.is_exact:
        return replace(tiles, ragged_rows=128, ragged_warps=8)
    return tiles
